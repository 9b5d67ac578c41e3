"""How fast due messages leave the ledger, beside bare SQL, and what claiming them ahead of time would cost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from sqlalchemy import event

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.delivery import next_due_ms
from airflow_delay_provider.dispatcher.dispatch_embedded import DispatchEmbedded
from airflow_delay_provider.dispatcher.loop import Context
from airflow_delay_provider.dispatcher.monitoring import PrometheusObserver
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.domain.clock import SystemClock
from benchmarks.bare import Bare, open_bare
from benchmarks.databases import Database, Rows
from benchmarks.ledger_checks import dispatch_times, expect_ledger
from benchmarks.measurement import MismatchError, Results, expect, rate, say
from benchmarks.processes import dispatchers

BATCH = DispatcherConfig().batch
#: The batch that a dispatcher finds when it polls every 10 ms at 1000 messages a second.
SMALL_BATCH = 10
DRAIN_SECONDS = 120.0
#: How often we check whether processes are done: seldom enough not to disturb them.
LOOK_SECONDS = 0.02
_LEDGER = "dispatch, loop"
_BARE_MARK = "bare take and mark"
_BARE_DUE = "bare take when due"
_BARE_AHEAD = "bare claim ahead"


def measure(databases: Sequence[Database], results: Results, *, messages: int, repeats: int) -> None:
    """Drain the same backlog in every way."""
    for database in databases:
        with database.fresh() as template:
            database.load(template, _due_backlog(messages))
            database.analyze(template)
            _measure_on(database, template, results, messages=messages, repeats=repeats)


def _measure_on(database: Database, template: str, results: Results, *, messages: int, repeats: int) -> None:
    small = max(SMALL_BATCH, messages // 10)
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        _LEDGER: lambda: _drain_with_loop(database, template, messages),
        _BARE_MARK: lambda: _drain_bare(database, template, Bare.mark_due, messages),
        _BARE_DUE: lambda: _drain_bare(database, template, Bare.take_when_due, messages),
        _BARE_AHEAD: lambda: _drain_bare(database, template, Bare.claim_ahead, messages),
        f"{_BARE_DUE}, 10 a batch": lambda: _drain_bare(
            database, template, Bare.take_when_due, small, batch=SMALL_BATCH
        ),
        f"{_BARE_AHEAD}, 10 a batch": lambda: _drain_bare(
            database, template, Bare.claim_ahead, small, batch=SMALL_BATCH
        ),
        "dispatch, 1 process": lambda: (_drain_with_processes(database, messages, 1), 0.0),
        "dispatch, 2 processes": lambda: (_drain_with_processes(database, messages, 2), 0.0),
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for repeat in range(repeats):
        say(f"dispatch on {database.name}: {messages} due messages in {len(ways)} ways, repeat {repeat + 1}/{repeats}")
        for way, drain in ways.items():
            found[way].append(drain())
    compared = {
        _LEDGER: _BARE_DUE,
        _BARE_DUE: _BARE_MARK,
        _BARE_AHEAD: _BARE_DUE,
        f"{_BARE_AHEAD}, 10 a batch": f"{_BARE_DUE}, 10 a batch",
        "dispatch, 1 process": _LEDGER,
        "dispatch, 2 processes": "dispatch, 1 process",
    }
    for way, drained in found.items():
        base = compared.get(way, "")
        results.add(
            database.name,
            way,
            [one for one, _ in drained],
            "messages/s",
            ratio_to=base,
            base=[one for one, _ in found[base]] if base else (),
        )
        if statements := [each for _, each in drained if each]:
            results.add(database.name, f"{way}: statements", statements, "statements/message")


def _drain_with_loop(database: Database, template: str, messages: int) -> tuple[float, float]:
    with database.fresh(template) as url:
        ledger = Ledger(url)
        context = Context(
            ledger=ledger, clock=SystemClock(), config=DispatcherConfig(), observers=[PrometheusObserver()]
        )
        loop = DispatchEmbedded(context)
        with ledger.read() as connection:
            expect("a message is due", next_due_ms(connection) is not None, True)
        sent = _count_statements(ledger)
        found = rate(messages, lambda: _until_nothing_is_due(loop.run_once))
        ledger.close()
        expect_ledger(url, scheduled=0, dispatched=messages, in_channels=messages, events=2 * messages)
    return found, sent.total() / messages


def _count_statements(ledger: Ledger) -> Counter[str]:
    sent: Counter[str] = Counter()

    def on_execute(_c: object, _cursor: object, _text: str, parameters: Any, _context: object, many: bool) -> None:
        sent["statement"] += len(parameters) if many else 1

    event.listen(ledger.engine, "before_cursor_execute", on_execute)
    for end in ("commit", "rollback"):
        event.listen(ledger.engine, end, lambda _: sent.update(["end"]))
    if ledger.dialect == "postgresql":
        # The driver sends it; on SQLite the ledger does, and it is counted above.
        event.listen(ledger.engine, "begin", lambda _: sent.update(["begin"]))
    return sent


def _until_nothing_is_due(run_once: Callable[[], float]) -> None:
    while run_once() <= 0:
        pass


def _drain_bare(
    database: Database, template: str, way: Callable[..., int], messages: int, *, batch: int = BATCH
) -> tuple[float, float]:
    with database.fresh(template) as url, closing(open_bare(database.name, database.connect(url))) as bare:
        drained = 0

        def drain() -> None:
            nonlocal drained
            while drained < messages:
                moved = way(bare, now_ms=int(time.time() * 1000), limit=batch)
                expect("there is more", moved > 0, True)
                drained += moved

        found = rate(messages, drain)
        expect("drained by bare SQL", bare.count_dispatched(), drained)
        return found, bare.statements / drained


def _drain_with_processes(database: Database, messages: int, n: int) -> float:
    """Give running dispatchers a backlog at once, and measure from their first dispatch to their last."""
    with database.fresh() as url:
        with dispatchers(url, n):
            database.load(url, _due_backlog(messages))
            drained_ms = _wait_until_drained(url)
        expect_ledger(url, scheduled=0, dispatched=messages, in_channels=messages, events=2 * messages)
        begun_ms = min(dispatched for _, dispatched in dispatch_times(url))
    return messages / (drained_ms - begun_ms) * 1000


def _wait_until_drained(url: str) -> float:
    ledger = Ledger(url)
    deadline = time.monotonic() + DRAIN_SECONDS
    try:
        while time.monotonic() < deadline:
            with ledger.read() as connection:
                if next_due_ms(connection) is None:
                    return time.time() * 1000
            time.sleep(LOOK_SECONDS)
    finally:
        ledger.close()
    raise MismatchError(f"messages still wait after {DRAIN_SECONDS} s")


def _due_backlog(messages: int) -> Rows:
    return Rows(total=messages, first_due_ms=int(time.time() * 1000) - 3_600_000)
