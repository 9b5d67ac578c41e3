"""Messages leave the ledger long after they ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, delete, exists, select, tuple_
from sqlalchemy.sql import ColumnElement

from airflow_delay_provider.brokers.ledger import fold, journal
from airflow_delay_provider.brokers.ledger.dialect import is_one_of, take
from airflow_delay_provider.brokers.ledger.records import AnyRow
from airflow_delay_provider.brokers.ledger.tables import channel_message, event, scheduled_message
from airflow_delay_provider.domain.lifecycle import State

_MESSAGE = scheduled_message.c
ENDED = (State.DISPATCHED, State.CANCELLED, State.DEAD)


class Place(NamedTuple):
    """How far a walk through the messages that ended has come, in the order of an index."""

    state: State = ENDED[0]
    deliver_at_ms: int = -(2**62)
    seq: int = 0


class Found(NamedTuple):
    """What one page of a walk has found."""

    state: State
    #: Messages that may be deleted.
    seqs: list[int]
    #: Where the walk goes on; None at its end.
    next: Place | None


def find_old(connection: Connection, place: Place, *, before_ms: int, limit: int) -> Found:
    """Read the next ``limit`` messages that ended, and return those that ended before ``before_ms``.

    A message that is still in a channel stays, however old, and so does one whose end is not in the figures yet.
    """
    query = (
        select(_MESSAGE.seq, _MESSAGE.deliver_at_ms, _is_old(connection, before_ms).label("is_old"))
        .where(
            _MESSAGE.state == place.state.value,
            tuple_(_MESSAGE.deliver_at_ms, _MESSAGE.seq) > tuple_(place.deliver_at_ms, place.seq),
        )
        .order_by(_MESSAGE.deliver_at_ms, _MESSAGE.seq)
        .limit(limit)
    )
    if place.state is State.DISPATCHED:
        # No message is dispatched before it is due, so later ones ended later, too: most of a large ledger is not read.
        query = query.where(_MESSAGE.deliver_at_ms < before_ms)
    rows = connection.execute(query).all()
    return Found(place.state, [row.seq for row in rows if row.is_old], _next(place, rows[-1:], len(rows) < limit))


def prune(connection: Connection, state: State, seqs: Sequence[int], *, before_ms: int) -> int:
    """Delete messages with their history, unless they have changed since they were found; return how many."""
    old = take(
        connection,
        select(_MESSAGE.seq).where(
            is_one_of(connection, _MESSAGE.seq, seqs),
            _MESSAGE.state == state.value,
            _is_old(connection, before_ms),
        ),
    )
    if not old:
        return 0
    connection.execute(delete(event).where(is_one_of(connection, event.c.message_seq, old)))
    rows = connection.execute(
        delete(scheduled_message)
        .where(is_one_of(connection, _MESSAGE.seq, old))
        .returning(_MESSAGE.channel, _MESSAGE.destination)
    ).all()
    journal.add_counts(connection, journal.count_moves(rows, before=state, after=None))
    return len(rows)


def _is_old(connection: Connection, before_ms: int) -> ColumnElement[bool]:
    unread = exists().where(channel_message.c.message_seq == _MESSAGE.seq)
    return (_MESSAGE.updated_at_ms < before_ms) & ~unread & ~fold.has_unfolded_entries(connection)


def _next(place: Place, last: Sequence[AnyRow], is_end: bool) -> Place | None:
    if not is_end:
        return Place(place.state, last[0].deliver_at_ms, last[0].seq)
    later = ENDED[ENDED.index(place.state) + 1 :]
    return Place(later[0]) if later else None
