"""The job on Spark is killed and continues; its ladder is given back to plain dispatchers."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from airflow_delay_provider.domain.exceptions import BrokerError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.spark.streaming.processor import RELEASE_BYTES
from tests.integration.pipeline.streaming_dispatcher import ids_of, serve_until_refused, streamed_ladder
from tests.integration.pipeline.test_dispatch_on_spark import early, messages_for
from tests.kafkas import dispatching, fresh_topic, require_kafka
from tools.servers.component import wait_for

pytestmark = pytest.mark.timeout(900)


def test_a_ladder_is_taken_over_survives_kills_and_is_given_back(kafka_connector: str, tmp_path: Path):
    with streamed_ladder(require_kafka(), kafka_connector, tmp_path) as ladder, ladder.open() as broker:
        channel = fresh_topic(ladder.bootstrap)
        # A plain dispatcher has begun these: some wait in rungs by then, some in its memory.
        first = messages_for(ladder, channel, 100, seconds=60)
        with ladder.open() as own, dispatching(own):
            broker.schedule(first)
            ladder.received(channel, 3)
        ladder.start()
        second = messages_for(ladder, channel, 300, seconds=30)
        broker.schedule(second)
        ladder.received(channel, 120)
        ladder.kill()

        with pytest.raises(BrokerError, match=r"a Spark job .* serves the ladder|dispatchers of another kind"):
            serve_until_refused(broker)

        ladder.start()
        ladder.received(channel, 400)
        last = [
            Message(
                id=uuid4().hex, channel=channel, payload=b"", deliver_at=broker.clock.now() + timedelta(hours=hours)
            )
            for hours in (1, 2, 48)
        ]
        broker.schedule(last)
        wait_for(
            lambda: (
                {entry.message_id for entry in broker.read_journal(after="", limit=10_000)}
                >= {each.id for each in last}
            ),
            what="the job has accepted them",
            seconds=120,
        )
        ladder.stop()
        code, written = ladder.run("--release")
        assert code == 0, written[-3000:]
        assert "with 3 waiting messages" in written
        with ladder.open() as own, dispatching(own):
            broker.cancel([last[0].id])
            broker.expedite([last[1].id])
            records = ladder.received(channel, 401)
        code, written = ladder.run()
        assert code == 2
        assert "was given back" in written

        counts = Counter(ids_of(records))
        assert set(counts) == {each.id for each in (*first, *second, last[1])}
        assert set(counts.values()) == {1}
        assert early(records) == []
        entries = broker.read_journal(after="", limit=10_000)
        begun = Counter(each.message_id for each in entries if each.change is Change.SCHEDULED)
        assert set(begun.values()) == {1}
        assert set(begun) == {each.id for each in (*first, *second, *last)}


def test_more_messages_of_one_time_than_a_task_releases_at_once_leave_once_each_although_the_job_is_killed(
    kafka_connector: str, tmp_path: Path
):
    with streamed_ladder(require_kafka(), kafka_connector, tmp_path) as ladder, ladder.open() as broker:
        channel = fresh_topic(ladder.bootstrap)
        ladder.start()
        due = broker.clock.now() + timedelta(seconds=30)
        payload = b"x" * 900_000
        assert 80 * len(payload) > 2 * RELEASE_BYTES
        messages = [
            Message(id=uuid4().hex, channel=channel, payload=payload, deliver_at=due, key="one") for _ in range(80)
        ]
        for start in range(0, len(messages), 20):
            broker.schedule(messages[start : start + 20])
        ladder.received(channel, 1)
        ladder.kill()
        ladder.start()
        ladder.received(channel, len(messages))
        last = Message(id=uuid4().hex, channel=channel, payload=b"", deliver_at=broker.clock.now())
        broker.schedule([last])
        records = ladder.received(channel, len(messages) + 1)
        assert early(records) == []
        assert Counter(ids_of(records)) == Counter(each.id for each in (*messages, last))
