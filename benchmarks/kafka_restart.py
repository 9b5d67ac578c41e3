"""A dispatcher that starts while many messages wait for later: how soon it serves, and how much memory it takes."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.domain.message import Message
from benchmarks.kafka_node import PAYLOAD_BYTES, STORE, Node, config_of
from benchmarks.kafka_processes import STOP, Usage, Worker, dispatch, started
from benchmarks.kafka_reading import Seen, watch
from benchmarks.measuring import Results, expect, say

BATCH = 10_000
#: Of the messages that wait: nothing moves while dispatchers are started, and all long rungs have some.
WAIT_SECONDS = (7_200, 30 * 86_400)
#: Of the message that is waited for.
FRESH_SECONDS = 1.0
#: How long the broker may take until nothing is left in the inbox.
MOVE_SECONDS = 300.0
UNITS = {"serves its lanes after": "s", "delivers a message of 1 s after": "s", "peak memory": "MB"}


def measure(node: Node, empty: Mapping[str, Any], results: Results, *, pending: int, repeats: int) -> None:
    """Start dispatchers on an empty ladder and on a full one in turn."""
    with node.topics(1) as (channel,), node.ladder(4) as full:
        say(f"restart: {pending} messages begin to wait")
        _fill(full, channel, pending)
        found: dict[tuple[int, str], list[float]] = {}
        for repeat in range(repeats):
            say(f"restart: 0 and {pending} messages wait, repeat {repeat + 1}/{repeats}")
            for n, settings in ((0, empty), (pending, full)):
                for name, value in zip(UNITS, _restart(node, settings), strict=True):
                    found.setdefault((n, name), []).append(value)
    for (n, name), values in found.items():
        base: dict[str, Any] = {"ratio_to": _name(0, name), "base": found[0, name]} if n else {}
        results.add(STORE, _name(n, name), values, UNITS[name], **base)


def _name(pending: int, what: str) -> str:
    return f"restart, {pending:,} wait: {what}"


def _fill(settings: Mapping[str, Any], channel: str, pending: int) -> None:
    """Schedule messages, and let a dispatcher put them all into the rungs in which they wait."""
    delays, left = random.Random(1), pending
    with KafkaBroker(config_of(settings)) as broker, started(dispatch, settings) as dispatcher:
        while left:
            now, n = datetime.now(UTC), min(BATCH, left)
            broker.schedule([_message(channel, now, delays.uniform(*WAIT_SECONDS)) for _ in range(n)])
            left -= n
        dispatcher.hear()
        _wait_until_still(dispatcher)
        dispatcher.ask(STOP)


def _wait_until_still(dispatcher: Worker) -> None:
    """Return when the dispatcher does next to nothing any more."""
    deadline, before = time.monotonic() + MOVE_SECONDS, dispatcher.ask("usage").cpu_seconds
    while True:
        time.sleep(2.0)
        now = dispatcher.ask("usage").cpu_seconds
        if now - before < 0.3:
            return
        expect("messages are in their rungs in time", time.monotonic() < deadline, True)
        before = now


def _restart(node: Node, settings: Mapping[str, Any]) -> tuple[float, float, float]:
    with (
        node.topics(1) as (channel,),
        started(watch, node.bootstrap, channel, 1, 60.0) as watcher,
        KafkaBroker(config_of(settings)) as broker,
    ):
        broker.check_channels([channel])
        watcher.hear()
        with started(dispatch, settings) as dispatcher:
            begin, at = time.monotonic(), time.time()
            broker.schedule([_message(channel, datetime.now(UTC), FRESH_SECONDS)])
            serves = dispatcher.hear() - begin
            seen: list[Seen] = watcher.hear()
            used: Usage = dispatcher.ask(STOP)
    return serves, seen[0].seen_at / 1000 - at, used.peak_rss_mb


def _message(channel: str, now: datetime, delay: float) -> Message:
    return Message(channel=channel, payload=os.urandom(PAYLOAD_BYTES), deliver_at=now + timedelta(seconds=delay))
