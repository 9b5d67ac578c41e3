from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

from airflow_delay_provider.brokers.consumer import BATCH, Bound, SharedConsumer
from airflow_delay_provider.domain.message import Message
from tests.contract.harness import BrokerHarness


class SharedConsumerContract:
    """Messages are seen as they arrive, within bounds, and all of them are left to consumers."""

    @contextmanager
    def consumer(self, harness: BrokerHarness) -> Iterator[SharedConsumer]:
        consumer = harness.open().open_shared_consumer(on_change=lambda: None)
        try:
            yield consumer
        finally:
            consumer.close()

    def sent_many(self, harness: BrokerHarness, channel: str, n: int, **options: object) -> list[Message]:
        messages = [harness.message(channel, after=0, **options) for _ in range(n)]
        harness.broker.send(messages)
        return messages

    def seen(
        self, harness: BrokerHarness, consumer: SharedConsumer, channel: str, n: int, bound: Bound | None = None
    ) -> list[Message]:
        view: list[Message] = []

        def sees_all() -> bool:
            found = consumer.look({channel: bound or Bound()})[channel]
            assert not isinstance(found, Exception), found
            view[:] = found
            return len(view) >= n

        harness.wait_until(sees_all, f"{n} messages seen in {channel}")
        return view

    def test_a_shared_consumer_sees_messages_as_they_come_and_leaves_them(self, harness: BrokerHarness):
        channel = harness.channel()
        with self.consumer(harness) as consumer:
            assert consumer.look({channel: Bound()}) == {channel: []}
            [first] = self.sent_many(harness, channel, 1)
            assert self.seen(harness, consumer, channel, 1) == [first]
            [second] = self.sent_many(harness, channel, 1)
            assert self.seen(harness, consumer, channel, 2) == [first, second]
        received = harness.receive(channel, 2)
        assert [delivery.message for delivery in received] == [first, second]

    def test_a_shared_consumer_has_no_more_messages_than_its_bound(self, harness: BrokerHarness):
        channel = harness.channel()
        messages = self.sent_many(harness, channel, 3 * BATCH)
        bound = Bound(messages=2 * BATCH)
        with self.consumer(harness) as consumer:
            assert self.seen(harness, consumer, channel, 2 * BATCH, bound) == messages[: 2 * BATCH]
            assert len(self.seen(harness, consumer, channel, 2 * BATCH, bound)) == 2 * BATCH

    def test_a_shared_consumer_asks_for_no_more_once_it_has_many_bytes(self, harness: BrokerHarness):
        channel = harness.channel()
        self.sent_many(harness, channel, 3 * BATCH, payload=b"x" * 1000)
        bound = Bound(bytes=5000)
        with self.consumer(harness) as consumer:
            for _ in range(5):
                assert 5 <= len(self.seen(harness, consumer, channel, 5, bound)) <= 5 + BATCH

    def test_a_channel_that_is_no_longer_watched_is_released(self, harness: BrokerHarness):
        channel, other = harness.channel(), harness.channel()
        [message] = self.sent_many(harness, channel, 1)
        with self.consumer(harness) as consumer:
            self.seen(harness, consumer, channel, 1)
            consumer.look({other: Bound()})
            assert harness.ids_in(channel, 1) == [message.id]

    def test_a_promised_message_goes_to_the_consumer_that_comes_for_it(self, harness: BrokerHarness):
        channel = harness.channel()
        first, promised = self.sent_many(harness, channel, 2)
        worker = harness.open()
        with self.consumer(harness) as consumer, ThreadPoolExecutor(1) as pool:
            self.seen(harness, consumer, channel, 2)
            consumer.promise(channel, promised.id)

            def take() -> list[str]:
                received = worker.receive(channel, limit=2, wait=timedelta(seconds=20))
                ids = [delivery.message.id for delivery in received]
                worker.ack([delivery for delivery in received if delivery.message.id == promised.id])
                worker.release([delivery for delivery in received if delivery.message.id != promised.id])
                return ids

            taken = pool.submit(take)
            harness.wait_until(
                lambda: consumer.look({channel: Bound()}) is not None and taken.done(), "the worker has received"
            )
            assert promised.id in taken.result()
            worker.close()
        assert harness.ids_in(channel, 1) == [first.id]
