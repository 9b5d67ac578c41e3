"""Ledgers for the HTTP API: messages of several channels, connections, DAGs and states, due within a year."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, insert, select

from airflow_delay_provider.brokers.ledger import fold
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.tables import statistic
from airflow_delay_provider.domain.lifecycle import Change, State
from airflow_delay_provider.domain.message import Origin
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, Ticket
from benchmarks.databases import Database

MINUTE_MS, HOUR_MS, DAY_MS = (step * 1000 for step in (fold.MINUTE, fold.HOUR, fold.DAY))
#: One message in four is a ticket of a Spark retry.
CHANNELS = ("bench.orders", "bench.invoices", "bench.mail", DEFAULT_CHANNEL)
#: One message in five each; the others are embedded. The broker of the first one holds its messages itself.
HELD_BY_BROKER, HELD_BY_LEDGER = "bench_rabbitmq", "bench_kafka"
#: One message in three each; the others come from outside of Airflow.
DAGS = ("bench_sales", "bench_reports")
TASKS = ("remind", "retry")
#: Consecutive messages of one DAG run, a sixth of which each of its tasks sent.
RUN = 600
#: The share of all messages up to which they are due, and when, from now on. No message becomes due while the
#: benchmark runs, because no dispatcher would dispatch it.
_DUE = (
    (0.30, -270 * DAY_MS, -30 * DAY_MS),
    (0.50, -30 * DAY_MS, -DAY_MS),
    (0.65, -DAY_MS, -HOUR_MS),
    (0.75, -HOUR_MS, -1000),
    (0.78, 20 * MINUTE_MS, HOUR_MS),
    (0.85, HOUR_MS, DAY_MS),
    (0.92, DAY_MS, 30 * DAY_MS),
    (1.00, 30 * DAY_MS, 95 * DAY_MS),
)
_PAST = 0.75
_FOLDED_PAGE = 250_000


@dataclass(frozen=True, kw_only=True)
class _Sql:
    """What differs between the databases."""

    series: str
    source: str
    random_id: str
    bytes_of: str
    xid: str


_SQL = {
    "sqlite": _Sql(
        series="WITH RECURSIVE g(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM g WHERE i + 1 < {n})",
        source="g",
        random_id="lower(hex(randomblob(16)))",
        bytes_of="CAST({text} AS BLOB)",
        xid="0",
    ),
    "postgresql": _Sql(
        series="",
        source="generate_series(CAST(0 AS BIGINT), {n} - 1) AS g(i)",
        random_id="replace(gen_random_uuid()::text, '-', '')",
        bytes_of="convert_to({text}, 'UTF8')",
        xid="pg_current_xact_id()::text::bigint",
    ),
}


def fill(database: Database, url: str, *, n: int, now_ms: int) -> None:
    """Fill an empty ledger with SQL that makes the rows in the database, and let the ledger fold their figures."""
    with closing(database.connect(url)) as connection:
        connection.execute("BEGIN")
        for statement in _statements(_SQL[database.name], n, now_ms):
            connection.execute(statement)
        connection.execute("COMMIT")
    database.analyze(url)
    _fold(url, now_ms)
    database.analyze(url)


def _fold(url: str, now_ms: int) -> None:
    """Do what dispatchers did until now."""
    with closing(Ledger(url)) as ledger:
        while ledger.transact(lambda connection: fold.fold(connection, _FOLDED_PAGE)):
            pass
        ledger.transact(lambda connection: _sample_depths(connection, now_ms))
        ledger.transact(lambda connection: fold.prune(connection, now_ms=now_ms))


def _sample_depths(connection: Connection, now_ms: int) -> None:
    """Take one sample, and repeat it for each minute of the last day, hour of two weeks and day of the last month."""
    fold.sample_depth(connection, now_ms=now_ms)
    samples = connection.execute(select(statistic).where(statistic.c.kind == fold.DEPTH)).mappings().all()
    earlier = {fold.MINUTE: range(1, 24 * 60), fold.HOUR: range(1, 14 * 24), fold.DAY: range(1, 30)}
    rows = [
        {**sample, "start_ms": sample["start_ms"] - steps * sample["step_seconds"] * 1000}
        for sample in samples
        for steps in earlier[sample["step_seconds"]]
    ]
    connection.execute(insert(statistic), rows)


def _statements(sql: _Sql, n: int, now_ms: int) -> Iterator[str]:
    state = f"""CASE WHEN i % 11 = 1 THEN {State.CANCELLED.value}
        WHEN i >= {int(n * _PAST)} THEN {State.SCHEDULED.value}
        WHEN i % 11 = 0 THEN {State.DEAD.value} ELSE {State.DISPATCHED.value} END"""
    channel = _one_of("i % 4", CHANNELS)
    # Tickets come from tasks; a third of the other messages does not.
    is_ticket = f"i % 4 = {CHANNELS.index(DEFAULT_CHANNEL)}"
    dag = f"CASE WHEN {is_ticket} THEN '{DAGS[0]}' ELSE {_one_of('i % 3', DAGS)} END"
    task = _one_of("(i / 3) % 2", TASKS)
    ticket = sql.bytes_of.format(text=f"coalesce({_ticket_text(now_ms, task)}, '')")
    text = sql.bytes_of.format(text=f"'{'x' * 256}'")
    yield f"""
        INSERT INTO delay_scheduled_message (id, channel, state, deliver_at_ms, scheduled_at_ms, updated_at_ms,
            dispatched_at_ms, payload, content_type, priority, handled_count, generation, destination, held_by_broker,
            dag_id, run_id, task_id, map_index)
        {sql.series.format(n=n)}
        SELECT id, channel, state, due,
            CASE WHEN due < {now_ms} THEN due - (1 + i * 7919 % 86400) * 1000
                ELSE {now_ms} - (1 + i * 7919 % 2592000) * 1000 END,
            CASE WHEN due < {now_ms} THEN due + 50 ELSE {now_ms} END,
            CASE WHEN state IN ({State.DISPATCHED.value}, {State.DEAD.value}) THEN due + i * 31 % 40 END,
            CASE WHEN channel = '{DEFAULT_CHANNEL}' THEN {ticket} ELSE {text} END, 'application/json', 0, 0, 0,
            destination, CASE WHEN destination = '{HELD_BY_BROKER}' THEN 1 ELSE 0 END,
            dag, CASE WHEN dag IS NOT NULL THEN 'run_' || (i / {RUN}) END,
            CASE WHEN dag IS NOT NULL THEN {task} END,
            CASE WHEN dag IS NOT NULL THEN i % {RUN} END
        FROM (SELECT i, {sql.random_id} AS id, {channel} AS channel, {state} AS state, {_due(n, now_ms)} AS due,
            {dag} AS dag, {_one_of("i % 5", (HELD_BY_BROKER, HELD_BY_LEDGER))} AS destination
            FROM {sql.source.format(n=n)}) AS made"""
    dead, cancelled = State.DEAD.value, State.CANCELLED.value
    for change, at, wanted, reason in (
        (Change.SCHEDULED, "scheduled_at_ms", "1 = 1", "NULL"),
        (Change.DISPATCHED, "dispatched_at_ms", "dispatched_at_ms IS NOT NULL", "NULL"),
        (Change.CANCELLED, "updated_at_ms", f"state = {cancelled}", "NULL"),
        (Change.DEAD_LETTERED, "updated_at_ms", f"state = {dead}", "'ValueError: no such customer'"),
    ):
        yield f"""
            INSERT INTO delay_event (xid, message_seq, message_id, channel, change, at_ms, deliver_at_ms, reason)
            SELECT {sql.xid}, seq, id, channel, '{change.value}', {at}, deliver_at_ms, {reason}
            FROM delay_scheduled_message WHERE {wanted} ORDER BY {at}"""
    yield """
        INSERT INTO delay_message_count (destination, channel, state, n)
        SELECT coalesce(destination, ''), channel, state, count(*) FROM delay_scheduled_message
        GROUP BY coalesce(destination, ''), channel, state"""


def _due(n: int, now_ms: int) -> str:
    whens, first = [], 0
    for share, since, until in _DUE:
        end = int(n * share)
        due = f"{now_ms + since} + (i - {first}) * {until - since} / {max(end - first, 1)}"
        whens.append(f"WHEN i < {end} THEN {due}")
        first = end
    return f"CASE {' '.join(whens)} END"


def _one_of(number: str, values: tuple[str, ...]) -> str:
    whens = " ".join(f"WHEN {position} THEN '{value}'" for position, value in enumerate(values))
    return f"CASE {number} {whens} END"


def _ticket_text(now_ms: int, task: str) -> str:
    """Return the SQL of a ticket of the row's own task."""
    text = f"'{json.dumps(_ticket(now_ms).as_json())}'"
    for name, value in (("@DAG", "dag"), ("@RUN", f"'run_' || (i / {RUN})"), ("@TASK", task)):
        text = text.replace(name, f"' || {value} || '")
    return text.replace('"map_index": -1', f"\"map_index\": ' || (i % {RUN}) || '")


def _ticket(now_ms: int) -> Ticket:
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    return Ticket(
        origin=Origin(dag_id="@DAG", run_id="@RUN", task_id="@TASK", map_index=-1),
        began_at=now,
        attempt=2,
        verdict="transient",
        reason="executor lost",
        cluster="spark://bench:7077",
        deliver_at=now,
    )
