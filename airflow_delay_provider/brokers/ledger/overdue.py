"""Which scheduled message is due first, by who holds it."""

from __future__ import annotations

from sqlalchemy import Connection, Label, Select, func, select

from airflow_delay_provider.brokers.ledger.delivery import next_due_ms
from airflow_delay_provider.brokers.ledger.tables import message_count, scheduled_message
from airflow_delay_provider.domain.arguments import Hold
from airflow_delay_provider.domain.lifecycle import State

_MESSAGE = scheduled_message.c
#: The counts name the connections that have scheduled messages.
_DESTINATIONS = (
    select(message_count.c.destination)
    .where(message_count.c.destination != "", message_count.c.state == State.SCHEDULED.value, message_count.c.n > 0)
    .distinct()
    .subquery()
)


def first_due_ms(connection: Connection) -> dict[Hold, int]:
    """Return when the first message is due that the ledger holds, and the first that a broker holds.

    It costs one index lookup for embedded messages and two for each connection, however many messages there are. A
    message that is being sent counts until the broker has confirmed it.
    """
    embedded_ms = next_due_ms(connection)
    found = {Hold.LEDGER: [] if embedded_ms is None else [embedded_ms], Hold.BROKER: list[int]()}
    for row in connection.execute(first_due_by_destination()):
        for hold, due in found.items():
            if (due_ms := row._mapping[hold.value]) is not None:
                due.append(due_ms)
    return {hold: min(due) for hold, due in found.items() if due}


def first_due_by_destination() -> Select[int | None, int | None]:
    """Return the query for the first due time of each connection, by hold."""
    return select(_first_due(Hold.LEDGER), _first_due(Hold.BROKER)).select_from(_DESTINATIONS)


def _first_due(hold: Hold) -> Label[int | None]:
    return (
        select(func.min(_MESSAGE.deliver_at_ms))
        .where(
            _MESSAGE.destination == _DESTINATIONS.c.destination,
            _MESSAGE.held_by_broker == int(hold is Hold.BROKER),
            _MESSAGE.state == State.SCHEDULED.value,
        )
        .scalar_subquery()
        .label(hold.value)
    )
