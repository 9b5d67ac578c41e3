"""Messages enter the ledger, and change while they are scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, bindparam, null, select, true, update

from airflow_delay_provider.brokers.ledger import journal, notices, replay
from airflow_delay_provider.brokers.ledger.dialect import Upsert, insert_rows, is_one_of, upsert_into
from airflow_delay_provider.brokers.ledger.records import MESSAGE_COLUMNS, AnyRow, StoredRow, row_of
from airflow_delay_provider.brokers.ledger.tables import scheduled_message
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.exceptions import ConflictError, LifecycleError, NoRecallError, UnknownMessageError
from airflow_delay_provider.domain.lifecycle import Change, State, allowed_from, outcome_of
from airflow_delay_provider.domain.message import Message

_MESSAGE = scheduled_message.c
_CONTENT = [
    "state",
    "updated_at_ms",
    *(column.name for column in MESSAGE_COLUMNS if column.name not in ("id", "channel")),
]


def insert(
    connection: Connection,
    messages: Sequence[Message],
    *,
    destination: str | None = None,
    on_conflict: OnConflict,
    now_ms: int,
    reason: str | None = None,
) -> dict[str, StoredRow]:
    """Store messages and return the rows that are new or replaced, by id.

    An id that is not returned was kept: a message of the same channel has it. A dead message is scheduled again, so
    that a cleared task sends it. The policy is part of the insert: of two writers with the same id, one inserts and the
    other gets the conflict. Raises, with nothing stored, if an id belongs to another channel or broker, if the policy
    says so, or if the message to replace is no longer scheduled.
    """
    if not messages:
        return {}
    rows = [row_of(message, destination=destination, now_ms=now_ms) for message in messages]
    stored = insert_rows(connection, _insert_statement(connection.dialect.name, on_conflict), rows)
    fresh = {row.id: row for row in stored}
    revived: list[StoredRow] = []
    if len(fresh) < len(messages):
        if on_conflict is not OnConflict.FAIL:
            revived = _revive(connection, [row for row in rows if row["id"] not in fresh], destination)
            fresh |= {row.id: row for row in revived}
        if taken := [message for message in messages if message.id not in fresh]:
            _refuse_conflicts(connection, taken, destination, on_conflict)
    created = [row for row in stored if row.generation == 0]
    changed = [row for row in stored if row.generation > 0]
    deltas = journal.count_moves(created, before=None, after=State.SCHEDULED)
    journal.append(connection, Change.SCHEDULED, _seqs(created), at_ms=now_ms, reason=reason)
    if on_conflict is OnConflict.REPLACE:
        journal.append(connection, Change.RESCHEDULED, _seqs(changed), at_ms=now_ms)
    else:
        journal.append(connection, Change.REQUEUED, _seqs(changed), at_ms=now_ms)
        deltas.update(journal.count_moves(changed, before=State.DISPATCHED, after=State.SCHEDULED))
    if revived:
        deltas.update(replay.record_return(connection, revived, now_ms=now_ms, reason="scheduled again"))
    journal.add_counts(connection, deltas)
    return fresh


def change_waiting(
    connection: Connection,
    message_ids: Sequence[str],
    change: Change,
    *,
    now_ms: int,
    deliver_at_ms: int | None = None,
    generation: int | None = None,
    reason: str | None = None,
) -> list[AnyRow]:
    """Cancel, reschedule or expedite scheduled messages, all or none, and return their rows.

    A message that a dispatcher is sending at this moment is refused.

    :param generation: refuse messages that have another one, because they were changed meanwhile.
    """
    wanted = list(dict.fromkeys(message_ids))
    if not wanted:
        return []
    values: dict[str, Any] = {
        "state": outcome_of(change).value,
        "updated_at_ms": now_ms,
        "generation": _MESSAGE.generation + 1,
    }
    if deliver_at_ms is not None:
        values["deliver_at_ms"] = deliver_at_ms
        notices.announce(connection, deliver_at_ms, now_ms=now_ms)
    changed = connection.execute(
        update(scheduled_message)
        .where(
            is_one_of(connection, _MESSAGE.id, wanted),
            _MESSAGE.state.in_(sorted(allowed_from(change))),
            _MESSAGE.claimed_until_ms.is_(None),
            _MESSAGE.held_by_broker == 0,
            true() if generation is None else _MESSAGE.generation == generation,
        )
        .values(values)
        .returning(_MESSAGE.seq, _MESSAGE.id, _MESSAGE.channel, _MESSAGE.destination)
    ).all()
    if len(changed) < len(wanted):
        _refuse_change(connection, set(wanted) - {row.id for row in changed}, change, generation)
    journal.append(connection, change, _seqs(changed), at_ms=now_ms, reason=reason)
    if outcome_of(change) is not State.SCHEDULED:
        journal.add_counts(connection, journal.count_moves(changed, before=State.SCHEDULED, after=outcome_of(change)))
    return list(changed)


def _revive(connection: Connection, rows: Sequence[dict[str, Any]], destination: str | None) -> list[StoredRow]:
    """Schedule dead messages again, with their new content, and return their rows.

    They are locked first, so that a replay at the same moment does not count them twice.
    """
    wanted = {row["id"]: row for row in rows}
    dead = connection.execute(
        select(_MESSAGE.seq, _MESSAGE.id, _MESSAGE.channel, _MESSAGE.generation)
        .where(
            is_one_of(connection, _MESSAGE.id, list(wanted)),
            _MESSAGE.state == State.DEAD.value,
            _MESSAGE.destination.is_not_distinct_from(destination),
        )
        .order_by(_MESSAGE.seq)
        .with_for_update()
    ).all()
    revived = [row for row in dead if row.channel == wanted[row.id]["channel"]]
    if revived:
        changed = [{f"new_{name}": wanted[row.id][name] for name in _CONTENT} | {"row_seq": row.seq} for row in revived]
        new: dict[str, Any] = {name: bindparam(f"new_{name}") for name in _CONTENT}
        connection.execute(
            update(scheduled_message)
            .where(_MESSAGE.seq == bindparam("row_seq"))
            .values(new | {"generation": _MESSAGE.generation + 1, "dispatched_at_ms": null(), "held_by_broker": 0}),
            changed,
        )
    return [
        StoredRow(row.seq, row.id, row.channel, destination, wanted[row.id]["deliver_at_ms"], row.generation + 1)
        for row in revived
    ]


@lru_cache
def _insert_statement(dialect: str, on_conflict: OnConflict) -> Upsert:
    statement = upsert_into(dialect, scheduled_message)
    match on_conflict:
        case OnConflict.FAIL:
            statement = statement.on_conflict_do_nothing(index_elements=["id"])
        case OnConflict.REPLACE:
            waits = (_MESSAGE.state == State.SCHEDULED.value) & _MESSAGE.claimed_until_ms.is_(None)
            statement = _overwrite(statement, waits & (_MESSAGE.held_by_broker == 0))
        case OnConflict.KEEP:
            # The same id has a higher count only if a consumer requeued the message.
            returns = (_MESSAGE.handled_count < statement.excluded.handled_count) & (
                _MESSAGE.state == State.DISPATCHED.value
            )
            statement = _overwrite(statement, returns)
    return statement


def _overwrite(statement: Upsert, condition: Any) -> Upsert:
    new = statement.excluded
    return statement.on_conflict_do_update(
        index_elements=["id"],
        set_={name: new[name] for name in _CONTENT}
        | {"generation": _MESSAGE.generation + 1, "dispatched_at_ms": null(), "held_by_broker": 0},
        where=condition
        & (_MESSAGE.channel == new.channel)
        & _MESSAGE.destination.is_not_distinct_from(new.destination),
    )


def _refuse_conflicts(
    connection: Connection, messages: Sequence[Message], destination: str | None, on_conflict: OnConflict
) -> None:
    taken = _find(connection, [message.id for message in messages])
    for message in messages:
        row = taken[message.id]
        if row.channel != message.channel:
            raise ConflictError(
                message.id,
                f"already exists in channel {row.channel!r}, not in {message.channel!r}; use another message_id",
            )
        if row.destination != destination:
            raise ConflictError(
                message.id,
                f"already exists for {_broker_name(row.destination)}, not for {_broker_name(destination)}; use another"
                " message_id",
            )
        if on_conflict is OnConflict.FAIL:
            raise ConflictError(
                message.id,
                f'already exists ({State(row.state).name}); use another message_id, or on_conflict="keep" or "replace"',
            )
        if on_conflict is OnConflict.REPLACE:
            raise ConflictError(
                message.id,
                f"is {_situation(row)} and cannot be replaced any more; use another message_id",
            )


def _refuse_change(connection: Connection, message_ids: set[str], change: Change, generation: int | None) -> None:
    found = _find(connection, sorted(message_ids))
    for message_id in sorted(message_ids):
        row = found.get(message_id)
        if row is None:
            raise UnknownMessageError(message_id)
        if row.held_by_broker and row.state in allowed_from(change):
            raise NoRecallError(
                message_id,
                f"is {_situation(row)} and cannot be {change.value}; schedule messages that you may have to recall with"
                ' hold="ledger"',
            )
        if row.state in allowed_from(change) and generation not in (None, row.generation):
            raise ConflictError(message_id, "was changed by another request meanwhile; load it again, then decide")
        if not (change is Change.CANCELLED and row.state == State.CANCELLED):
            raise LifecycleError(
                message_id,
                f"is {_situation(row)} and cannot be {change.value} any more; only a scheduled message can",
            )


def _find(connection: Connection, message_ids: Sequence[str]) -> dict[str, AnyRow]:
    query = select(
        _MESSAGE.id,
        _MESSAGE.channel,
        _MESSAGE.destination,
        _MESSAGE.state,
        _MESSAGE.claimed_until_ms,
        _MESSAGE.held_by_broker,
        _MESSAGE.generation,
    )
    rows = connection.execute(query.where(is_one_of(connection, _MESSAGE.id, message_ids)))
    return {row.id: row for row in rows}


def _situation(row: AnyRow) -> str:
    if row.held_by_broker and row.state == State.SCHEDULED:
        return f"held by the broker of connection {row.destination!r}"
    return "being dispatched" if row.claimed_until_ms is not None else State(row.state).name


def _broker_name(destination: str | None) -> str:
    return "an embedded channel" if destination is None else f"connection {destination!r}"


def _seqs(rows: Sequence[AnyRow | StoredRow]) -> list[int]:
    return [row.seq for row in rows]
