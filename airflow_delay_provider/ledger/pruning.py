"""What is long over leaves the ledger."""

from __future__ import annotations

from sqlalchemy import Connection, delete, exists, select

from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.ledger import counts
from airflow_delay_provider.ledger.dialect import is_one_of, take
from airflow_delay_provider.ledger.tables import channel_message, event, scheduled_message

_MESSAGE = scheduled_message.c
ENDED = (State.DISPATCHED, State.CANCELLED, State.DEAD)


def prune(connection: Connection, *, before_ms: int, limit: int) -> int:
    """Delete up to ``limit`` messages that ended before ``before_ms``, with their history, and return how many.

    A message that still lies in a channel stays, however old.
    """
    deleted = 0
    for state in ENDED:
        deleted += _prune_state(connection, state, before_ms=before_ms, limit=limit - deleted)
    return deleted


def _prune_state(connection: Connection, state: State, *, before_ms: int, limit: int) -> int:
    unread = exists().where(channel_message.c.message_seq == _MESSAGE.seq)
    old = take(
        connection,
        select(_MESSAGE.seq)
        .where(_MESSAGE.state == state.value, _MESSAGE.updated_at_ms < before_ms, ~unread)
        .order_by(_MESSAGE.deliver_at_ms, _MESSAGE.seq)
        .limit(limit),
    )
    if not old:
        return 0
    connection.execute(delete(event).where(is_one_of(connection, event.c.message_seq, old)))
    rows = connection.execute(
        delete(scheduled_message)
        .where(is_one_of(connection, _MESSAGE.seq, old))
        .returning(_MESSAGE.channel, _MESSAGE.destination)
    ).all()
    counts.apply(connection, counts.moves(rows, before=state, after=None))
    return len(rows)
