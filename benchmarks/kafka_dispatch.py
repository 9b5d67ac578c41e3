"""How fast a dispatcher takes messages from the inbox through all their rests to their channel, and what that costs."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.message import Message
from benchmarks.kafka_leaps import LANES, Arrived, Voyage, climb
from benchmarks.kafka_node import PARTITIONS, Node, config_of
from benchmarks.kafka_processes import STOP, Worker, started
from benchmarks.kafka_raw import Filling, copy
from benchmarks.kafka_reading import read_all
from benchmarks.measuring import MismatchError, Results, expect, say

HOUR_MS = 3_600_000
PAYLOAD_BYTES = 100
STORE = "radix 4"
OURS, TWO = "dispatch, 1 process", "dispatch, 2 processes"
RAW, RAW_BARE = "raw transactional copy", "raw transactional copy, no headers"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measurement, by message."""

    rate: float
    moves_rate: float
    writes: float
    dispatcher_us: float
    broker_us: float


def measure(
    node: Node, ladders: Mapping[int, Mapping[str, Any]], results: Results, *, messages: int, repeats: int
) -> dict[str, list[float]]:
    """Run ours and the raw copies in turn, then other radixes; return the rates."""
    idle_share = node.idle_share(1.0)
    found: dict[tuple[str, str], list[Run]] = {}
    for repeat in range(-1, repeats):
        # The first round is not counted: a new broker is slow until its code is compiled.
        n = messages if repeat >= 0 else min(messages, 5_000)
        say(f"dispatch: {n} messages each way, " + (f"repeat {repeat + 1}/{repeats}" if repeat >= 0 else "to warm up"))
        for store, name, run in _ways(node, ladders, n, idle_share):
            if repeat >= 0:
                found.setdefault((store, name), []).append(run)
    for (store, name), runs in found.items():
        _add(results, found, store, name, runs)
    return {name: [run.rate for run in runs] for (store, name), runs in found.items() if store == STORE}


def _ways(
    node: Node, ladders: Mapping[int, Mapping[str, Any]], n: int, idle_share: float
) -> Iterator[tuple[str, str, Run]]:
    yield STORE, RAW, _run_raw(node, n, idle_share, with_headers=True)
    yield STORE, OURS, run_ladder(node, ladders[4], n, idle_share)
    yield STORE, RAW_BARE, _run_raw(node, n, idle_share, with_headers=False)
    yield STORE, TWO, run_ladder(node, ladders[4], n, idle_share, dispatchers=2)
    for radix in ladders.keys() - {4}:
        yield f"radix {radix}", OURS, run_ladder(node, ladders[radix], n, idle_share)


def _add(
    results: Results, found: Mapping[tuple[str, str], list[Run]], store: str, name: str, runs: Sequence[Run]
) -> None:
    base = {OURS: RAW, RAW_BARE: RAW, TWO: OURS}.get(name, "")
    others = found.get((STORE, base), [])
    ratio: dict[str, Any] = {"ratio_to": base, "base": [run.rate for run in others]} if base else {}
    results.add(store, name, [run.rate for run in runs], "messages/s", **ratio)
    if name in (OURS, TWO):
        results.add(store, f"{name}: moves", [run.moves_rate for run in runs], "moves/s")
        results.add(store, f"{name}: writes", [run.writes for run in runs], "writes/message")
    results.add(store, f"{name}: CPU of dispatchers", [run.dispatcher_us for run in runs], "us/message")
    results.add(store, f"{name}: CPU of the broker", [run.broker_us for run in runs], "us/message")


# -- ours ----------------------------------------------------------------------------------------------------------


def run_ladder(
    node: Node,
    settings: Mapping[str, Any],
    n: int,
    idle_share: float,
    *,
    dispatchers: int = 1,
    delay_ms: int = HOUR_MS,
) -> Run:
    """Take ``n`` messages from the inbox to a channel."""
    with ExitStack() as stack:
        workers = [stack.enter_context(started(climb, settings)) for _ in range(dispatchers)]
        wait_for_lanes(workers)
        run = voyage(node, settings, workers, n, idle_share, delay_ms=delay_ms)
        for worker in workers:
            worker.tell(STOP)
    return run


def wait_for_lanes(workers: Sequence[Worker]) -> None:
    """Return when the lanes are shared evenly."""
    deadline = time.monotonic() + 60
    while True:
        lanes = [worker.ask(LANES) for worker in workers]
        if sorted(lane for each in lanes for lane in each) == list(range(PARTITIONS)) and all(lanes):
            return
        if time.monotonic() > deadline:
            raise MismatchError(f"the dispatchers have the lanes {lanes}")


def voyage(
    node: Node,
    settings: Mapping[str, Any],
    workers: Sequence[Worker],
    n: int,
    idle_share: float,
    *,
    delay_ms: int,
) -> Run:
    """Let dispatchers that serve lanes take messages to a new channel, and see that all of them are there."""
    with node.topics(1) as (channel,):
        return _voyage(node, config_of(settings).topology, workers, channel, n, idle_share, delay_ms)


def _voyage(
    node: Node,
    topology: Topology,
    workers: Sequence[Worker],
    channel: str,
    n: int,
    idle_share: float,
    delay_ms: int,
) -> Run:
    start_ms = int(time.time() * 1000)
    messages = [
        Message(channel=channel, payload=os.urandom(PAYLOAD_BYTES), deliver_at=from_ms(start_ms + delay_ms))
        for _ in range(n)
    ]
    lanes = Counter(topology.lane_of(None, message.id) for message in messages)
    filling = Filling(node.bootstrap)
    filling.write(topology.inbox, (_in_inbox(topology, message, start_ms) for message in messages))
    plan = Voyage(start_ms=start_ms, delay_ms=delay_ms, by_lane=[lanes[lane] for lane in range(PARTITIONS)])
    for worker in workers:
        expect("the dispatcher's answer", worker.ask(plan), "begin")
    before, begin = node.cpu_seconds, filling.show()
    arrived: list[Arrived] = [worker.hear() for worker in workers]
    run = _summed(arrived, begin, node.cpu_seconds - before, idle_share)
    _expect_all(node, channel, {message.id.encode() for message in messages})
    return run


def _in_inbox(topology: Topology, message: Message, now_ms: int) -> tuple[bytes, bytes, int, None]:
    due_ms = int(message.deliver_at.timestamp() * 1000)
    lane = topology.lane_of(message.key, message.id)
    return wire.write_key(due_ms, message.id), wire.write_envelope(message, now_ms=now_ms), lane, None


def _summed(arrived: Sequence[Arrived], begin: float, broker_seconds: float, idle_share: float) -> Run:
    seconds = max(each.ended_at for each in arrived) - begin
    n, rests = sum(each.dispatched for each in arrived), sum(each.rests for each in arrived)
    return Run(
        rate=n / seconds,
        moves_rate=(n + rests) / seconds,
        writes=(n + rests) / n,
        dispatcher_us=sum(each.cpu_seconds for each in arrived) / n * 1e6,
        broker_us=(broker_seconds - idle_share * seconds) / n * 1e6,
    )


def _expect_all(node: Node, channel: str, ids: set[bytes]) -> None:
    found = [dict(record.headers() or ())[wire.ID] for record in read_all(node.bootstrap, channel, len(ids))]
    expect("messages that arrived once", len(set(found)), len(found))
    expect("messages that arrived", set(found) == ids, True)


# -- raw -----------------------------------------------------------------------------------------------------------


def _run_raw(node: Node, n: int, idle_share: float, *, with_headers: bool) -> Run:
    now_ms = int(time.time() * 1000)
    with node.topics(2) as (source, target):
        messages = [
            Message(channel=target, payload=os.urandom(PAYLOAD_BYTES), deliver_at=from_ms(now_ms)) for _ in range(n)
        ]
        filling = Filling(node.bootstrap)
        filling.write(
            source, (_delivered(message, number, now_ms, with_headers) for number, message in enumerate(messages))
        )
        with started(copy, node.bootstrap, source, target, n, with_headers) as worker:
            expect("the copy's answer", worker.hear(), "begin")
            before, begin = node.cpu_seconds, filling.show()
            arrived: Arrived = worker.hear()
        run = _summed([arrived], begin, node.cpu_seconds - before, idle_share)
        expect("records copied", len(read_all(node.bootstrap, target, n)), n)
    return run


def _delivered(
    message: Message, number: int, now_ms: int, with_headers: bool
) -> tuple[None, bytes, int, wire.Headers | None]:
    headers = wire.write_headers(message, now_ms=now_ms, topic=message.channel) if with_headers else None
    return None, message.payload, number % PARTITIONS, headers
