"""Schedule dead messages of the ledger again, due now."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, exists, func, select, update
from sqlalchemy.sql import ColumnElement

from airflow_delay_provider.brokers.ledger import journal, notices
from airflow_delay_provider.brokers.ledger.dialect import contains, is_one_of, take
from airflow_delay_provider.brokers.ledger.records import AnyRow, StoredRow
from airflow_delay_provider.brokers.ledger.tables import channel_message, event, scheduled_message
from airflow_delay_provider.domain.clock import ceil_ms
from airflow_delay_provider.domain.dead_letters import DeadLetters
from airflow_delay_provider.domain.lifecycle import Change, State, outcome_of

_MESSAGE = scheduled_message.c
REASON = "replayed"


def count(connection: Connection, selection: DeadLetters, *, destination: str | None) -> int:
    """Return how many messages the selection includes."""
    conditions = _conditions(connection, selection, destination)
    return int(connection.execute(select(func.count()).select_from(scheduled_message).where(*conditions)).scalar_one())


def replay(
    connection: Connection,
    selection: DeadLetters,
    *,
    destination: str | None,
    now_ms: int,
    died_until_ms: int,
    limit: int,
) -> list[AnyRow]:
    """Schedule up to ``limit`` messages again and return their rows; they start with a handled count of 0.

    State, journal and counts are one transaction. A message in an embedded dead-letter channel leaves it.

    :param died_until_ms: when the replay began: a message that becomes dead later is not replayed again.
    """
    conditions = _conditions(connection, selection, destination)
    dead = (
        select(_MESSAGE.seq)
        .where(*conditions, _MESSAGE.updated_at_ms <= died_until_ms)
        .order_by(_MESSAGE.deliver_at_ms, _MESSAGE.seq)
        .limit(limit)
    )
    seqs = take(connection, dead)
    if not seqs:
        return []
    rows = connection.execute(
        update(scheduled_message)
        .where(is_one_of(connection, _MESSAGE.seq, seqs), _MESSAGE.state == State.DEAD.value)
        .values(
            state=outcome_of(Change.REQUEUED).value,
            deliver_at_ms=now_ms,
            updated_at_ms=now_ms,
            dispatched_at_ms=None,
            handled_count=0,
            generation=_MESSAGE.generation + 1,
        )
        .returning(_MESSAGE.seq, _MESSAGE.id, _MESSAGE.channel, _MESSAGE.destination)
    ).all()
    notices.announce(connection, now_ms, now_ms=now_ms)
    journal.add_counts(connection, record_return(connection, rows, now_ms=now_ms, reason=REASON))
    return list(rows)


def record_return(
    connection: Connection, rows: Sequence[AnyRow | StoredRow], *, now_ms: int, reason: str
) -> journal.Deltas:
    """Record that dead messages are scheduled again, and return the changes of the counts.

    They leave the embedded dead-letter channels.
    """
    seqs = [row.seq for row in rows]
    connection.execute(delete(channel_message).where(is_one_of(connection, channel_message.c.message_seq, seqs)))
    journal.append(connection, Change.REQUEUED, seqs, at_ms=now_ms, reason=reason)
    return journal.count_moves(rows, before=State.DEAD, after=State.SCHEDULED)


def given_up_by_consumers(
    connection: Connection, selection: DeadLetters, *, destination: str, after_seq: int, limit: int
) -> list[AnyRow]:
    """Return dead messages of which a consumer has put a copy into a dead-letter channel of another broker.

    Messages that the dispatcher marked as dead were never dispatched.
    """
    return list(
        connection.execute(
            select(_MESSAGE.seq, _MESSAGE.id, _MESSAGE.channel)
            .where(
                *_conditions(connection, selection, destination),
                _MESSAGE.dispatched_at_ms.is_not(None),
                _MESSAGE.seq > after_seq,
            )
            .order_by(_MESSAGE.seq)
            .limit(limit)
        )
    )


def _conditions(connection: Connection, selection: DeadLetters, destination: str | None) -> list[ColumnElement[bool]]:
    """Return the conditions of the selection; a broker that holds messages itself replays its own."""
    conditions = [
        _MESSAGE.state == State.DEAD.value,
        _MESSAGE.destination.is_(None) if destination is None else _MESSAGE.destination == destination,
        _MESSAGE.held_by_broker == 0,
    ]
    if selection.message_ids:
        conditions.append(is_one_of(connection, _MESSAGE.id, selection.message_ids))
    equal = {name: getattr(selection, name) for name in ("channel", "dag_id", "run_id", "task_id")}
    conditions += [_MESSAGE[name] == wanted for name, wanted in equal.items() if wanted is not None]
    if selection.since is not None:
        conditions.append(_MESSAGE.updated_at_ms >= ceil_ms(selection.since))
    if selection.until is not None:
        conditions.append(_MESSAGE.updated_at_ms < ceil_ms(selection.until))
    if selection.dead_letter_channel is not None and destination is None:
        conditions.append(
            exists().where(
                channel_message.c.message_seq == _MESSAGE.seq,
                channel_message.c.channel == selection.dead_letter_channel,
            )
        )
    if selection.reason is not None:
        later = event.alias("later")
        is_end = (later.c.message_seq == event.c.message_seq) & (later.c.change == Change.DEAD_LETTERED.value)
        last = select(func.max(later.c.seq)).where(is_end).correlate(event).scalar_subquery()
        said = contains(connection, event.c.reason, journal.storable(selection.reason))
        conditions.append(
            exists().where(event.c.message_seq == _MESSAGE.seq, event.c.seq == last.scalar_subquery(), said)
        )
    return conditions
