"""What a dispatcher costs while there is nothing to do: it watches all rungs, so more of them cost more."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from benchmarks.kafka_node import Node
from benchmarks.kafka_processes import STOP, dispatch, started
from benchmarks.measuring import Results, say

SETTLE_SECONDS = 1.0


def measure(
    node: Node, ladders: Mapping[int, Mapping[str, Any]], results: Results, *, seconds: float, repeats: int
) -> None:
    """Look at one ladder after the other while its dispatcher waits."""
    found: dict[tuple[int, str], list[float]] = {}
    for repeat in range(repeats):
        say(f"idle: a dispatcher on each ladder for {seconds:g} s, repeat {repeat + 1}/{repeats}")
        alone = node.idle_share(seconds / 2)
        for radix, settings in ladders.items():
            with started(dispatch, settings) as dispatcher:
                dispatcher.hear()
                time.sleep(SETTLE_SECONDS)
                before = dispatcher.ask("usage").cpu_seconds
                broker = node.idle_share(seconds) - alone
                used = dispatcher.ask(STOP).cpu_seconds - before
            found.setdefault((radix, "dispatcher"), []).append(used / seconds * 100)
            found.setdefault((radix, "broker"), []).append(max(0.0, broker) * 100)
    for (radix, who), values in found.items():
        results.add(f"radix {radix}", f"idle, CPU of the {who}", values, "% of a core")
