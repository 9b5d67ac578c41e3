"""One run of dispatchers, or of a plain copy loop: from records that become visible at once to the last commit."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.domain.clock import ceil_ms, from_ms
from airflow_delay_provider.domain.message import Message
from benchmarks.kafka_leaps import LANES, Arrived, Voyage, climb
from benchmarks.kafka_node import PARTITIONS, PAYLOAD_BYTES, Node, config_of
from benchmarks.kafka_processes import STOP, Worker, started
from benchmarks.kafka_raw import Filling, copy
from benchmarks.kafka_reading import read_all
from benchmarks.measuring import MismatchError, expect


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was found out, by message."""

    rate: float
    moves_rate: float
    writes: float
    dispatcher_us: float
    broker_us: float


class Runner:
    """Fills what is to be read, lets others do the work, and sees that all of it was done."""

    def __init__(self, node: Node, *, idle_seconds: float = 1.0) -> None:
        self._node = node
        self._filling = Filling(node.bootstrap)
        self._idle_share = node.idle_share(idle_seconds)

    def dispatch(self, settings: Mapping[str, Any], n: int, *, delay_ms: int, dispatchers: int = 1) -> Run:
        """Start dispatchers on a ladder, and let them take ``n`` messages from the inbox to a channel."""
        with ExitStack() as stack:
            workers = [stack.enter_context(started(climb, settings)) for _ in range(dispatchers)]
            wait_for_lanes(workers)
            run = self.travel(settings, workers, n, delay_ms=delay_ms)
            for worker in workers:
                worker.tell(STOP)
        return run

    def travel(self, settings: Mapping[str, Any], workers: Sequence[Worker], n: int, *, delay_ms: int) -> Run:
        """Let dispatchers that serve lanes do the same."""
        topology, start_ms = config_of(settings).topology, int(time.time() * 1000)
        with self._node.topics(1) as (channel,):
            messages = _messages(channel, n, start_ms + delay_ms)
            lanes = Counter(topology.lane_of(None, message.id) for message in messages)
            self._filling.write(topology.inbox, (_in_inbox(topology, message, start_ms) for message in messages))
            plan = Voyage(start_ms=start_ms, delay_ms=delay_ms, by_lane=[lanes[lane] for lane in range(PARTITIONS)])
            for worker in workers:
                expect("the dispatcher's answer", worker.ask(plan), "begin")
            run = self._measure(workers)
            found = [dict(each.headers() or ())[wire.ID] for each in read_all(self._node.bootstrap, channel, n)]
        expect("messages that arrived once", len(set(found)), n)
        expect("all messages arrived", set(found) == {message.id.encode() for message in messages}, True)
        return run

    def copy(self, n: int, *, with_headers: bool) -> Run:
        """Let a plain loop copy ``n`` records from one topic to another."""
        now_ms = int(time.time() * 1000)
        with self._node.topics(2) as (source, target):
            records = (_delivered(message, now_ms, with_headers) for message in _messages(target, n, now_ms))
            self._filling.write(source, records)
            with started(copy, self._node.bootstrap, source, target, n, with_headers) as worker:
                expect("the copy's answer", worker.hear(), "begin")
                run = self._measure([worker])
            expect("records copied", len(read_all(self._node.bootstrap, target, n)), n)
        return run

    def _measure(self, workers: Sequence[Worker]) -> Run:
        before, begin = self._node.cpu_seconds, self._filling.show()
        arrived: list[Arrived] = [worker.hear() for worker in workers]
        broker_seconds = self._node.cpu_seconds - before
        seconds = max(each.ended_at for each in arrived) - begin
        n, rests = sum(each.dispatched for each in arrived), sum(each.rests for each in arrived)
        return Run(
            rate=n / seconds,
            moves_rate=(n + rests) / seconds,
            writes=(n + rests) / n,
            dispatcher_us=sum(each.cpu_seconds for each in arrived) / n * 1e6,
            broker_us=max(0.0, broker_seconds - self._idle_share * seconds) / n * 1e6,
        )


def wait_for_lanes(workers: Sequence[Worker]) -> None:
    """Return when each has some lanes, and all are served."""
    deadline = time.monotonic() + 60
    while True:
        lanes = [worker.ask(LANES) for worker in workers]
        if sorted(lane for each in lanes for lane in each) == list(range(PARTITIONS)) and all(lanes):
            return
        if time.monotonic() > deadline:
            raise MismatchError(f"the dispatchers have the lanes {lanes}")


def _messages(channel: str, n: int, due_ms: int) -> list[Message]:
    due = from_ms(due_ms)
    return [Message(channel=channel, payload=os.urandom(PAYLOAD_BYTES), deliver_at=due) for _ in range(n)]


def _in_inbox(topology: Topology, message: Message, now_ms: int) -> tuple[bytes, bytes, int, None]:
    key = wire.write_key(ceil_ms(message.deliver_at), message.id)
    return key, wire.write_envelope(message, now_ms=now_ms), topology.lane_of(message.key, message.id), None


def _delivered(message: Message, now_ms: int, with_headers: bool) -> tuple[None, bytes, int, wire.Headers | None]:
    headers = wire.write_headers(message, now_ms=now_ms, topic=message.channel) if with_headers else None
    return None, message.payload, -1, headers
