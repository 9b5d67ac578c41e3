"""How many messages are in each state, kept in step inside the transactions that change them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sqlalchemy import Connection, exists, func, select

from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.ledger.dialect import upsert_into
from airflow_delay_provider.ledger.records import AnyRow, StoredRow
from airflow_delay_provider.ledger.tables import message_count, scheduled_message

#: (destination, channel, state) -> change of its count.
Deltas = Counter[tuple[str, str, int]]


def moves(rows: Iterable[AnyRow | StoredRow], *, before: State | None, after: State | None) -> Deltas:
    """Return what it means for the counts that ``rows`` left ``before`` and entered ``after``."""
    deltas: Deltas = Counter()
    for (destination, channel), n in Counter((row.destination, row.channel) for row in rows).items():
        if before is not None:
            deltas[(destination or "", channel, before.value)] -= n
        if after is not None:
            deltas[(destination or "", channel, after.value)] += n
    return deltas


def apply(connection: Connection, deltas: Deltas) -> None:
    """Add ``deltas``, sorted, so that writers never wait in a circle; call it last, so that they wait briefly."""
    changed = [
        {"destination": destination, "channel": channel, "state": state, "n": n}
        for (destination, channel, state), n in sorted(deltas.items())
        if n
    ]
    if not changed:
        return
    statement = upsert_into(connection.dialect.name, message_count)
    statement = statement.on_conflict_do_update(
        index_elements=["destination", "channel", "state"],
        set_={"n": message_count.c.n + statement.excluded.n},
    )
    connection.execute(statement, changed)


def by_state(connection: Connection, *, channel: str | None = None, destination: str | None = None) -> dict[State, int]:
    """Return the number of messages in each state, of one channel or of all, for one connection or for all."""
    query = select(message_count.c.state, func.sum(message_count.c.n)).group_by(message_count.c.state)
    if channel is not None:
        query = query.where(message_count.c.channel == channel)
    if destination is not None:
        query = query.where(message_count.c.destination == destination)
    found = {State(state): int(n) for state, n in connection.execute(query)}
    return {state: found.get(state, 0) for state in State}


def by_channel(connection: Connection, *, destination: str | None = None) -> dict[str, dict[State, int]]:
    """Return the number of messages in each state of each channel, for one connection or for all."""
    query = (
        select(message_count.c.channel, message_count.c.state, func.sum(message_count.c.n))
        .group_by(message_count.c.channel, message_count.c.state)
        .order_by(message_count.c.channel)
    )
    if destination is not None:
        query = query.where(message_count.c.destination == destination)
    found: dict[str, dict[State, int]] = {}
    for channel, state, n in connection.execute(query):
        found.setdefault(channel, dict.fromkeys(State, 0))[State(state)] = int(n)
    return found


def waiting_destinations(connection: Connection) -> list[str]:
    """Return the connections of other brokers that messages here wait for to be sent.

    The counts name the candidates; one look at an index for each leaves out those that wait in the broker itself.
    """
    message = scheduled_message.c
    to_send = exists().where(
        message.state == State.SCHEDULED.value,
        message.destination == message_count.c.destination,
        message.claimed_until_ms.is_(None),
        message.held_by_broker == 0,
    )
    query = (
        select(message_count.c.destination)
        .where(
            message_count.c.destination != "",
            message_count.c.state == State.SCHEDULED.value,
            message_count.c.n > 0,
            to_send,
        )
        .distinct()
        .order_by(message_count.c.destination)
    )
    return list(connection.execute(query).scalars())
