"""What the contract needs besides the port: fresh names, time that passes, and what a broker can do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from threading import Barrier
from typing import Any, TypeVar
from uuid import uuid4

import pytest

from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.domain.arguments import Limits
from airflow_delay_provider.domain.lifecycle import JournalEntry
from airflow_delay_provider.domain.message import Delivery, Message

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """What not every broker can do; the contract skips the rest and says so."""

    #: A waiting message can be cancelled, rescheduled and expedited.
    recall: bool = True
    #: An id that is taken is seen, so that conflict policies hold.
    knows_ids: bool = True
    #: An unsettled message is delivered again after ``visibility``, counted as handled.
    visibility: bool = True
    #: Consumers side by side share single messages; otherwise they share partitions of a channel.
    shares_messages: bool = True
    #: The journal has the time of each dispatch, for late readers too.
    records_times: bool = True


class BrokerHarness:
    """One broker under test. Each adapter writes one of these, and the contract runs on it unchanged."""

    abilities = Abilities()
    #: Delays in the contract are multiples of this: long enough for the broker to tell two of them apart.
    unit = timedelta(seconds=1)
    #: How long a real broker may take for what should happen at once.
    patience = timedelta(seconds=60)
    #: How late a message may be; well below ``patience``, or nothing would ever be too late.
    on_time = timedelta(seconds=20)

    def __init__(self) -> None:
        self._opened: list[Broker] = []

    @cached_property
    def broker(self) -> Broker:
        """The client that most tests use; a test that skips opens none."""
        broker = self.open()
        # What a first connection costs is not a delay of a message.
        broker.check()
        return broker

    def make_broker(self, limits: Limits | None) -> Broker:
        """Return a new client of the server under test."""
        raise NotImplementedError

    def prepare_channel(self, name: str) -> None:
        """Create what a consumer of this channel needs, where the broker does not do so by itself."""

    def pass_time(self, delta: timedelta) -> None:
        """Return when ``delta`` has passed on the broker's clock."""
        time.sleep(delta.total_seconds())

    def dispatch(self) -> None:
        """Dispatch due messages, where no process does so by itself."""

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Return once ``condition`` holds; fail when it does not within the patience."""
        deadline = time.monotonic() + self.patience.total_seconds()
        self.dispatch()
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"not within {self.patience}: {what}")
            time.sleep(0.02)
            self.dispatch()

    # -- for the tests -------------------------------------------------------------------------------------------

    def open(self, *, limits: Limits | None = None) -> Broker:
        """Return another client of the same broker, closed after the test; clients are not shared by threads."""
        broker = self.make_broker(limits)
        self._opened.append(broker)
        return broker

    def close(self) -> None:
        for broker in self._opened:
            broker.close()

    def needs(self, ability: str) -> None:
        if not getattr(self.abilities, ability):
            pytest.skip(f"{type(self).__name__}: a broker without {ability!r}")

    def units(self, n: float) -> timedelta:
        return self.unit * n

    def channel(self) -> str:
        """Return a channel that no other test uses."""
        name = f"contract-{uuid4().hex}"
        self.prepare_channel(name)
        self.prepare_channel(f"{name}.dead")
        # What a first look at a channel costs is not a delay of a message either.
        self.broker.check_channels([name])
        return name

    def message(self, channel: str, *, after: float, **options: Any) -> Message:
        """Return a message that is due ``after`` units from now."""
        options.setdefault("payload", uuid4().bytes)
        return Message(channel=channel, deliver_at=self.broker.clock.now() + self.units(after), **options)

    def receive(self, channel: str, n: int, *, visibility: timedelta = timedelta(minutes=5)) -> list[Delivery]:
        """Return the next ``n`` messages of a channel, none of which may be early."""
        received = self.receive_even_if_early(channel, n, visibility=visibility)
        now = self.broker.clock.now()
        assert all(delivery.message.deliver_at <= now for delivery in received)
        return received

    def receive_even_if_early(
        self, channel: str, n: int, *, visibility: timedelta = timedelta(minutes=5)
    ) -> list[Delivery]:
        received: list[Delivery] = []

        def got_all() -> bool:
            received.extend(self.broker.receive(channel, limit=n - len(received), visibility=visibility))
            return len(received) >= n

        self.wait_until(got_all, f"{n} messages in {channel}")
        return received

    def see(self, channel: str, n: int, *, limit: int) -> list[Message]:
        """Return what can be seen in a channel as soon as that is ``n`` messages."""
        seen: list[Message] = []

        def sees_all() -> bool:
            seen[:] = self.broker.peek(channel, limit=limit)
            return len(seen) >= n

        self.wait_until(sees_all, f"{n} messages to be seen in {channel}")
        return seen

    def timer(self, delta: timedelta) -> Callable[[], bool]:
        """Return a function: has ``delta`` passed from now on, by the test's clock or on a slow machine?"""
        due, end = self.broker.clock.now() + delta, time.monotonic() + delta.total_seconds()
        return lambda: self.broker.clock.now() >= due or time.monotonic() >= end

    def assert_nothing_before(self, has_passed: Callable[[], bool], channel: str) -> None:
        """No message is in the channel before its time; a slow machine may pass that time meanwhile."""
        seen = self.broker.peek(channel)
        assert seen == [] or has_passed()

    def assert_waits(self, message: Message) -> None:
        """The message is not in its channel before it is due."""
        self.assert_nothing_before(lambda: self.broker.clock.now() >= message.deliver_at, message.channel)

    def assert_lateness(self, dispatched: JournalEntry) -> None:
        """The lateness of a dispatch is right, or unknown where a broker tells it only to readers who are there."""
        if dispatched.lateness is None:
            assert not self.abilities.records_times
        else:
            assert timedelta(0) <= dispatched.lateness <= self.on_time

    def ids_in(self, channel: str, n: int) -> list[str]:
        """Receive and acknowledge the next ``n`` messages of a channel and return their ids."""
        deliveries = self.receive(channel, n)
        self.broker.ack(deliveries)
        return [delivery.message.id for delivery in deliveries]

    def dead_letters(self, channel: str, n: int = 1) -> list[Delivery]:
        return self.receive(f"{channel}.dead", n)


def run_together(work: Sequence[Callable[[], ResultT]]) -> list[ResultT | BaseException]:
    """Run each in its own thread, all starting at the same moment, and return results or errors in order."""
    start = Barrier(len(work))

    def run(one: Callable[[], ResultT]) -> ResultT | BaseException:
        start.wait()
        try:
            return one()
        except Exception as error:  # noqa: BLE001 - the caller looks at it
            return error

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(run, work))
