"""Which scheduled message is due first, by who holds it."""

from __future__ import annotations

from sqlalchemy import Connection, Select, literal, select, tuple_

from airflow_delay_provider.brokers.ledger.delivery import next_due_ms
from airflow_delay_provider.brokers.ledger.tables import EMBEDDED, message_count, scheduled_message
from airflow_delay_provider.domain.arguments import Hold
from airflow_delay_provider.domain.lifecycle import State

_MESSAGE = scheduled_message.c
#: The columns of the index for one connection, in its order.
_ORDER = (_MESSAGE.destination, _MESSAGE.held_by_broker, _MESSAGE.state, _MESSAGE.deliver_at_ms)


def first_due_ms(connection: Connection) -> dict[Hold, int]:
    """Return when the first message is due that the ledger holds, and the first that a broker holds."""
    found: dict[Hold, int] = {}
    for (hold, _), due_ms in first_due_by_connection(connection).items():
        found[hold] = min(due_ms, found.get(hold, due_ms))
    return found


def first_due_by_connection(connection: Connection) -> dict[tuple[Hold, str], int]:
    """Return when the first message of each connection is due, by who holds it.

    It costs one index lookup for embedded messages and two for each connection, however many messages there are. A
    message that is being sent counts until the broker has confirmed it.
    """
    due = {(Hold.LEDGER, EMBEDDED): next_due_ms(connection)}
    for destination in _waiting_destinations(connection):
        for hold in Hold:
            due[hold, destination] = _first_due_of(connection, destination, hold)
    return {key: due_ms for key, due_ms in due.items() if due_ms is not None}


def _waiting_destinations(connection: Connection) -> list[str]:
    """Return the connections that have scheduled messages, from the counts."""
    counted = message_count.c
    waiting = select(counted.destination).where(
        counted.destination != EMBEDDED, counted.state == State.SCHEDULED.value, counted.n > 0
    )
    return list(connection.execute(waiting.distinct()).scalars())


def _first_due_of(connection: Connection, destination: str, hold: Hold) -> int | None:
    held_by_broker = int(hold is Hold.BROKER)
    row = connection.execute(seek(destination, held_by_broker)).first()
    if row is None or (row.destination, row.held_by_broker, row.state) != (
        destination,
        held_by_broker,
        State.SCHEDULED.value,
    ):
        return None
    due_ms: int = row.deliver_at_ms
    return due_ms


def seek(destination: str, held_by_broker: int) -> Select[str | None, int, int, int]:
    """Return the query for the index entry at which the scheduled messages of a connection begin.

    The order is that of the index, so that a database has no choice: asked for a minimum, PostgreSQL may prefer the
    index of all scheduled messages and read those of every other connection.
    """
    start = (destination, held_by_broker, State.SCHEDULED.value, 0)
    at_or_after = tuple_(*_ORDER) >= tuple_(*(literal(value) for value in start))
    return select(*_ORDER).where(_MESSAGE.destination.is_not(None), at_or_after).order_by(*_ORDER).limit(1)
