"""What consumers do with dispatched messages: put back or given up, whichever broker's channel they were in."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, case, select, update

from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.lifecycle import Change, State, allowed_from, outcome_of
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.domain.schedule import OnConflict
from airflow_delay_provider.exceptions import LifecycleError
from airflow_delay_provider.ledger import counts, delivery, journal, scheduling
from airflow_delay_provider.ledger.records import AnyRow
from airflow_delay_provider.ledger.tables import scheduled_message

_MESSAGE = scheduled_message.c


def put_back(
    connection: Connection, seq: int, message: Message, *, deliver_at_ms: int, now_ms: int, reason: str | None
) -> None:
    """Let a message wait again for its own channel.

    A dead letter starts with a count of none: kept, it would be above the threshold that ended it.
    """
    handled = case((_MESSAGE.state == State.DEAD.value, 0), else_=message.handled_count + 1)
    # From now on the ledger holds it, even if its broker did before.
    values = {
        "deliver_at_ms": deliver_at_ms,
        "handled_count": handled,
        "dispatched_at_ms": None,
        "held_by_broker": 0,
    }
    _change(connection, seq, message, Change.REQUEUED, values, now_ms=now_ms, reason=reason)


def give_up(connection: Connection, seq: int, message: Message, *, now_ms: int, reason: str) -> None:
    """Record that a message will not be tried again; it stays known under its own channel."""
    values = {"handled_count": message.handled_count}
    _change(connection, seq, message, Change.DEAD_LETTERED, values, now_ms=now_ms, reason=reason)


def put_back_from(
    connection: Connection,
    message: Message,
    *,
    destination: str,
    deliver_at_ms: int,
    now_ms: int,
    reason: str | None,
) -> int | None:
    """Let a message of another broker wait here for its own channel, and return its number.

    None is a message that was cancelled, or of which another copy was put back before. One that the ledger does not
    know was pruned, or came into that channel without the ledger: it is new.
    """
    row = _find_dispatched(connection, message, destination=destination, now_ms=now_ms)
    if row is None:
        again = message.requeued(from_ms(deliver_at_ms))
        fresh = scheduling.insert(
            connection, [again], destination=destination, on_conflict=OnConflict.KEEP, now_ms=now_ms, reason=reason
        )
        return fresh[again.id].seq if fresh else None
    if State(row.state) not in allowed_from(Change.REQUEUED):
        return None
    put_back(connection, row.seq, message, deliver_at_ms=deliver_at_ms, now_ms=now_ms, reason=reason)
    seq: int = row.seq
    return seq


def give_up_at(connection: Connection, message: Message, *, destination: str, now_ms: int, reason: str) -> None:
    """Record that a message lies in the dead-letter channel of another broker, if the ledger knows it as dispatched."""
    row = _find_dispatched(connection, message, destination=destination, now_ms=now_ms)
    if row is not None and row.state == State.DISPATCHED:
        give_up(connection, row.seq, message, now_ms=now_ms, reason=reason)


def _find_dispatched(connection: Connection, message: Message, *, destination: str, now_ms: int) -> AnyRow | None:
    """Return the row of a message that a consumer of another broker has in hand.

    It was dispatched, then, even if the process that sent it has not said so yet, or died before it could: that is
    recorded first. A row with a higher count was put back since, so it does wait.
    """
    query = (
        select(_MESSAGE.seq, _MESSAGE.state, _MESSAGE.handled_count)
        .where(_MESSAGE.id == message.id, _MESSAGE.channel == message.channel, _MESSAGE.destination == destination)
        .with_for_update()
    )
    row = connection.execute(query).one_or_none()
    if row is None or row.state != State.SCHEDULED or row.handled_count > message.handled_count:
        return row
    delivery.mark_sent(connection, [row.seq], now_ms=now_ms)
    return connection.execute(query).one()


def _change(
    connection: Connection,
    seq: int,
    message: Message,
    change: Change,
    values: dict[str, Any],
    *,
    now_ms: int,
    reason: str | None,
) -> None:
    row = connection.execute(
        select(_MESSAGE.seq, _MESSAGE.channel, _MESSAGE.destination, _MESSAGE.state).where(_MESSAGE.seq == seq)
    ).one()
    before = State(row.state)
    if before not in allowed_from(change):
        raise LifecycleError(message.id, f"is {before.name} and cannot be {change.value}")
    after = outcome_of(change)
    connection.execute(
        update(scheduled_message)
        .where(_MESSAGE.seq == seq)
        .values(values | {"state": after.value, "updated_at_ms": now_ms, "generation": _MESSAGE.generation + 1})
    )
    journal.append(connection, change, [seq], at_ms=now_ms, reason=reason)
    counts.apply(connection, counts.moves([row], before=before, after=after))
