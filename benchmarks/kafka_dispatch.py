"""How fast a dispatcher takes messages from the inbox through all their rests to their channel, and what that costs."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from airflow_delay_provider.brokers.kafka import header_protocol as protocol
from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.domain.clock import ceil_ms, from_ms
from airflow_delay_provider.domain.message import Message
from benchmarks.kafka_leaps import PARTITIONS_SERVED, Arrived, Batch, Filling, copy, run_leaping_dispatcher
from benchmarks.kafka_node import PARTITIONS, PAYLOAD_BYTES, STOP, STORE, Node, Worker, config_of, read_all, started
from benchmarks.measurement import MismatchError, Results, expect, say

HOUR_MS = 3_600_000
#: Messages each way before anything counts: a new broker is slow until its code is compiled.
WARM_UP = 5_000
OURS, TWO = "dispatch, 1 process", "dispatch, 2 processes"
RAW, RAW_BARE = "raw transactional copy", "raw transactional copy, no headers"
_BASES = {OURS: RAW, RAW_BARE: RAW, TWO: OURS}


def measure(
    node: Node, ladders: Mapping[int, Mapping[str, Any]], results: Results, *, messages: int, repeats: int
) -> dict[str, list[float]]:
    """Run ours and the raw copies in turn, then other radixes; return the rates."""
    runner = Runner(node)
    found: dict[tuple[str, str], list[Run]] = {}
    if messages > WARM_UP:
        say(f"dispatch: {WARM_UP} messages each way to warm up")
        for _ in _ways(runner, ladders, WARM_UP):
            pass
    for repeat in range(repeats):
        say(f"dispatch: {messages} messages each way, repeat {repeat + 1}/{repeats}")
        for store, name, run in _ways(runner, ladders, messages):
            found.setdefault((store, name), []).append(run)
    for (store, name), runs in found.items():
        base = _BASES.get(name, "")
        _add(results, store, name, runs, base, [run.rate for run in found.get((STORE, base), [])])
    return {name: [run.rate for run in runs] for (store, name), runs in found.items() if store == STORE}


def _ways(runner: Runner, ladders: Mapping[int, Mapping[str, Any]], n: int) -> Iterator[tuple[str, str, Run]]:
    yield STORE, RAW, runner.copy(n, with_headers=True)
    yield STORE, OURS, runner.dispatch(ladders[4], n, delay_ms=HOUR_MS)
    yield STORE, RAW_BARE, runner.copy(n, with_headers=False)
    yield STORE, TWO, runner.dispatch(ladders[4], n, delay_ms=HOUR_MS, dispatchers=2)
    for radix in ladders.keys() - {4}:
        yield f"radix {radix}", OURS, runner.dispatch(ladders[radix], n, delay_ms=HOUR_MS)


def _add(results: Results, store: str, name: str, runs: Sequence[Run], base: str, base_rates: Sequence[float]) -> None:
    results.add(store, name, [run.rate for run in runs], "messages/s", ratio_to=base, base=base_rates)
    if name in (OURS, TWO):
        results.add(store, f"{name}: moves", [run.moves_rate for run in runs], "moves/s")
        results.add(store, f"{name}: writes", [run.writes for run in runs], "writes/message")
    results.add(store, f"{name}: CPU of dispatchers", [run.dispatcher_us for run in runs], "us/message")
    results.add(store, f"{name}: CPU of the broker", [run.broker_us for run in runs], "us/message")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The measured costs, by message."""

    rate: float
    moves_rate: float
    writes: float
    dispatcher_us: float
    broker_us: float


class Runner:
    """Writes the input, lets dispatchers process it, and checks that all of it was processed."""

    def __init__(self, node: Node, *, idle_seconds: float = 1.0) -> None:
        self._node = node
        self._filling = Filling(node.bootstrap)
        self._idle_share = node.idle_share(idle_seconds)

    def dispatch(self, settings: Mapping[str, Any], n: int, *, delay_ms: int, dispatchers: int = 1) -> Run:
        """Start dispatchers on a ladder, and let them take ``n`` messages from the inbox to a channel."""
        with ExitStack() as stack:
            workers = [stack.enter_context(started(run_leaping_dispatcher, settings)) for _ in range(dispatchers)]
            wait_for_partitions(workers)
            run = self.travel(settings, workers, n, delay_ms=delay_ms)
            for worker in workers:
                worker.tell(STOP)
        return run

    def travel(self, settings: Mapping[str, Any], workers: Sequence[Worker], n: int, *, delay_ms: int) -> Run:
        """Let dispatchers that serve partitions do the same."""
        topology, start_ms = config_of(settings).topology, int(time.time() * 1000)
        with self._node.topics(1) as (channel,):
            messages = _messages(channel, n, start_ms + delay_ms)
            partitions = Counter(topology.partition_of(None, message.id) for message in messages)
            self._filling.write(topology.inbox, (_in_inbox(topology, message, start_ms) for message in messages))
            plan = Batch(
                start_ms=start_ms,
                delay_ms=delay_ms,
                by_partition=[partitions[partition] for partition in range(PARTITIONS)],
            )
            for worker in workers:
                expect("the dispatcher's answer", worker.ask(plan), "begin")
            run = self._measure(workers)
            found = [dict(each.headers() or ())[protocol.ID] for each in read_all(self._node.bootstrap, channel, n)]
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


def wait_for_partitions(workers: Sequence[Worker]) -> None:
    """Return when each has some partitions, and all are served."""
    deadline = time.monotonic() + 60
    while True:
        partitions = [worker.ask(PARTITIONS_SERVED) for worker in workers]
        if sorted(partition for each in partitions for partition in each) == list(range(PARTITIONS)) and all(
            partitions
        ):
            return
        if time.monotonic() > deadline:
            raise MismatchError(f"the dispatchers have the partitions {partitions}")


def _messages(channel: str, n: int, due_ms: int) -> list[Message]:
    due = from_ms(due_ms)
    return [Message(channel=channel, payload=os.urandom(PAYLOAD_BYTES), deliver_at=due) for _ in range(n)]


def _in_inbox(topology: Topology, message: Message, now_ms: int) -> tuple[bytes, bytes, int, None]:
    key = wire.encode_key(ceil_ms(message.deliver_at), message.id)
    return key, wire.encode_envelope(message, now_ms=now_ms), topology.partition_of(message.key, message.id), None


def _delivered(message: Message, now_ms: int, with_headers: bool) -> tuple[None, bytes, int, protocol.Headers | None]:
    headers = wire.encode_headers(message, now_ms=now_ms, topic=message.channel) if with_headers else None
    return None, message.payload, -1, headers
