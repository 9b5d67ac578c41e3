"""Fold the journal into figures, so that reading them costs the same at any number of messages.

``delay_statistic`` counts the changes in each minute, hour and day, and ``delay_due_count`` the scheduled messages that
are due in them. Figures lag behind the journal by a few seconds, and are exact for the entries that were folded: a page
of entries and the step of the position behind it are one transaction.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import (
    BigInteger,
    Connection,
    Subquery,
    and_,
    case,
    cast,
    delete,
    exists,
    func,
    literal,
    literal_column,
    not_,
    or_,
    select,
    union_all,
)
from sqlalchemy.sql import ColumnElement

from airflow_delay_provider.brokers.ledger import histogram, journal, projection
from airflow_delay_provider.brokers.ledger.dialect import oldest_running_transaction, upsert_into
from airflow_delay_provider.brokers.ledger.tables import (
    EMBEDDED,
    due_count,
    event,
    message_count,
    scheduled_message,
    statistic,
)
from airflow_delay_provider.domain.clock import ONE_MS
from airflow_delay_provider.domain.lifecycle import TIME_UNKNOWN, Change, State, outcome_of

MINUTE, HOUR, DAY = 60, 3600, 86_400
#: Kind of the rows that hold samples of the number of scheduled messages.
DEPTH = "depth"
MINUTES_KEPT = timedelta(days=2)
HOURS_KEPT = timedelta(days=14)
DAYS_KEPT = timedelta(days=400)
#: Due counts of the past are of no use; a clock that is behind may still ask for them.
DUE_KEPT = timedelta(hours=1)
_WAITING_AFTER = sorted(change.value for change in Change if outcome_of(change) is State.SCHEDULED)


def fold(connection: Connection, limit: int) -> int:
    """Count the next ``limit`` journal entries and return how many there were; 0 if another process counts them.

    Each entry is counted once: of several processes, one makes the step to the end of the page, and the others wait for
    its commit and change nothing. A crash before the commit undoes counts and step together.
    """
    after = projection.position_of(connection, EMBEDDED)
    page = journal.entries_after(connection, after)
    found = page.where(event.c.xid < oldest_running_transaction(connection)).limit(limit).subquery()
    last = connection.execute(
        select(found.c.xid, found.c.seq, func.count().over().label("n"))
        .order_by(found.c.xid.desc(), found.c.seq.desc())
        .limit(1)
    ).one_or_none()
    if last is None:
        return 0
    if not projection.step(connection, EMBEDDED, after=after, position=f"{last.xid}:{last.seq}"):
        return 0
    # All transactions of the page have ended, so every statement finds the same entries. With a limit and not an end,
    # SQLite reads no further than the page.
    entry = page.limit(last.n).subquery("entry")
    _add_statistics(connection, entry)
    _add_due_counts(connection, entry)
    n: int = last.n
    return n


def has_unfolded_entries(connection: Connection) -> ColumnElement[bool]:
    """Match messages of which a journal entry is not counted yet: without it, their due counts would stay for ever."""
    after = projection.position_of(connection, EMBEDDED)
    return exists().where(event.c.message_seq == scheduled_message.c.seq, journal.is_after(connection, after))


def _add_statistics(connection: Connection, entry: Subquery) -> None:
    is_dispatch = entry.c.change == Change.DISPATCHED.value
    is_unknown = func.coalesce(entry.c.reason, "") == TIME_UNKNOWN
    lateness = entry.c.at_ms - entry.c.deliver_at_ms
    each = (
        select(
            _start(entry.c.at_ms, MINUTE).label("minute_ms"),
            func.coalesce(scheduled_message.c.destination, EMBEDDED).label("destination"),
            entry.c.change.label("kind"),
            case(
                (and_(is_dispatch, is_unknown), literal_column(str(histogram.UNKNOWN))),
                (is_dispatch, histogram.bucket_of(lateness)),
                else_=literal_column("0"),
            ).label("bucket"),
            case((and_(is_dispatch, not_(is_unknown)), func.abs(lateness)), else_=literal_column("0")).label("ms"),
        )
        .join_from(entry, scheduled_message, scheduled_message.c.seq == entry.c.message_seq)
        .subquery()
    )
    place = (each.c.destination, each.c.kind, each.c.bucket)
    minutes = select(each.c.minute_ms, *place, func.count().label("n"), func.max(each.c.ms).label("max_ms"))
    minute = minutes.group_by(each.c.minute_ms, *place).subquery()
    steps = _steps(MINUTE, HOUR, DAY)
    spread = select(
        steps.c.step_seconds,
        _start(minute.c.minute_ms, steps.c.step_seconds).label("start_ms"),
        *(minute.c[name] for name in ("destination", "kind", "bucket", "n", "max_ms")),
    ).select_from(minute.join(steps, literal(True)))
    row = spread.subquery()
    key = [row.c[column.name] for column in statistic.primary_key]
    sums = select(*key, cast(func.sum(row.c.n), BigInteger()), func.max(row.c.max_ms)).group_by(*key)
    statement = upsert_into(connection.dialect.name, statistic).from_select([c.name for c in statistic.columns], sums)
    new = statement.excluded
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=[column.name for column in statistic.primary_key],
            set_={
                "n": statistic.c.n + new.n,
                "max_ms": case((new.max_ms > statistic.c.max_ms, new.max_ms), else_=statistic.c.max_ms),
            },
        )
    )


def _add_due_counts(connection: Connection, entry: Subquery) -> None:
    """Add 1 where an entry leaves a message scheduled, and take 1 where the entry before it did so.

    The sum over all entries of a message depends on its last entry only, whichever entry is folded first: on PostgreSQL
    a transaction with a lower number may have changed the message later.
    """
    previous, earlier = event.alias("previous"), event.alias("earlier")
    is_previous = previous.c.seq == (
        select(func.max(earlier.c.seq))
        .where(earlier.c.message_seq == entry.c.message_seq, earlier.c.seq < entry.c.seq)
        .correlate(entry)
        .scalar_subquery()
    )
    destination = func.coalesce(scheduled_message.c.destination, EMBEDDED).label("destination")
    of_message = scheduled_message.c.seq == entry.c.message_seq
    added = (
        select(entry.c.deliver_at_ms, destination, literal_column("1").label("n"))
        .join_from(entry, scheduled_message, of_message)
        .where(entry.c.change.in_(_WAITING_AFTER))
    )
    # The first entry of a message has none before it.
    taken = (
        select(previous.c.deliver_at_ms, destination, literal_column("-1").label("n"))
        .select_from(entry.join(scheduled_message, of_message).join(previous, is_previous))
        .where(entry.c.change != Change.SCHEDULED.value, previous.c.change.in_(_WAITING_AFTER))
    )
    each = union_all(added, taken).subquery()
    minute_ms = _start(each.c.deliver_at_ms, MINUTE).label("minute_ms")
    minutes = select(minute_ms, each.c.destination, func.sum(each.c.n).label("n"))
    minute = minutes.group_by(minute_ms, each.c.destination).having(func.sum(each.c.n) != 0).subquery()
    steps = _steps(MINUTE, HOUR, DAY)
    row = (
        select(
            steps.c.step_seconds,
            _start(minute.c.minute_ms, steps.c.step_seconds).label("start_ms"),
            minute.c.destination,
            minute.c.n,
        )
        .select_from(minute.join(steps, literal(True)))
        .subquery()
    )
    key = [row.c[column.name] for column in due_count.primary_key]
    sums = select(*key, cast(func.sum(row.c.n), BigInteger())).group_by(*key)
    statement = upsert_into(connection.dialect.name, due_count).from_select([c.name for c in due_count.columns], sums)
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=[column.name for column in due_count.primary_key],
            set_={"n": due_count.c.n + statement.excluded.n},
        )
    )


def sample_depth(connection: Connection, *, now_ms: int) -> None:
    """Store how many messages are scheduled now, as the figure of this minute, hour and day."""
    steps = _steps(MINUTE, HOUR, DAY)
    now = literal(now_ms, BigInteger())
    depth = (
        select(message_count.c.destination, cast(func.sum(message_count.c.n), BigInteger()).label("n"))
        .where(message_count.c.state == State.SCHEDULED.value)
        .group_by(message_count.c.destination)
        .subquery()
    )
    rows = (
        select(
            steps.c.step_seconds,
            _start(now, steps.c.step_seconds),
            depth.c.destination,
            literal_column(f"'{DEPTH}'"),
            literal_column("0"),
            depth.c.n,
            literal_column("0"),
        )
        .select_from(depth.join(steps, literal(True)))
        .where(literal(True))
    )
    statement = upsert_into(connection.dialect.name, statistic).from_select([c.name for c in statistic.columns], rows)
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=[column.name for column in statistic.primary_key], set_={"n": statement.excluded.n}
        )
    )


def prune(connection: Connection, *, now_ms: int) -> int:
    """Delete figures that are too old, and empty due counts; return how many rows."""
    old = [
        and_(statistic.c.step_seconds == step, statistic.c.start_ms < now_ms - kept // ONE_MS)
        for step, kept in ((MINUTE, MINUTES_KEPT), (HOUR, HOURS_KEPT), (DAY, DAYS_KEPT))
    ]
    past = [
        and_(due_count.c.step_seconds == step, due_count.c.start_ms <= now_ms - DUE_KEPT // ONE_MS - step * 1000)
        for step in (MINUTE, HOUR, DAY)
    ]
    deleted = connection.execute(delete(statistic).where(or_(*old))).rowcount
    return deleted + connection.execute(delete(due_count).where(or_(due_count.c.n == 0, *past))).rowcount


def start_of(moment_ms: int, step_seconds: int) -> int:
    """Return the start of the interval that contains a moment."""
    return moment_ms - moment_ms % (step_seconds * 1000)


def _start(moment_ms: ColumnElement[int], step_seconds: int | ColumnElement[int]) -> ColumnElement[int]:
    """Return the start of the interval that contains a moment."""
    step_ms = literal_column(str(step_seconds * 1000)) if isinstance(step_seconds, int) else step_seconds * 1000
    return moment_ms - moment_ms % step_ms


def _steps(*seconds: int) -> Subquery:
    each = [select(literal_column(str(step), BigInteger()).label("step_seconds")) for step in seconds]
    return union_all(*each).subquery()
