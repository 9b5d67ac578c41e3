"""How fast a dispatcher takes messages from the inbox through all their rests to their channel, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.kafka_node import STORE, Node
from benchmarks.kafka_runs import Run, Runner
from benchmarks.measuring import Results, say

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
