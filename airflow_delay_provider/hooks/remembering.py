"""Scheduling the messages of a task once, also on brokers that cannot tell whether an id is taken."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from airflow_delay_provider.exceptions import DelayError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.base import Broker, Receipt
    from airflow_delay_provider.domain.message import Message
    from airflow_delay_provider.domain.schedule import OnConflict

KEY = "delay_confirmed"
#: Messages between two notes.
BATCH = 1000


class StateStore(Protocol):
    """Airflow's store of a task's own state, which its next try finds."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return what was stored."""
        ...

    def set(self, key: str, value: Any) -> None:
        """Store it."""
        ...


class TaskMemory:
    """Which messages of a task are confirmed, and the journal position from before the first of them.

    Noted after each batch. What remains is the window between a confirmation and its note: a worker that dies there
    leaves messages that the next try publishes again, with the same ids.
    """

    def __init__(self, store: StateStore | None, message_ids: Sequence[str]) -> None:
        self._store = store
        self._digest = sha256("\n".join(message_ids).encode()).hexdigest()
        known = store.get(KEY) if store is not None else None
        if not isinstance(known, dict) or known.get("digest") != self._digest:
            known = {}
        self.since: str | None = known.get("since")
        self._seen: int = known.get("seen", 0)
        self._open: set[int] = set(known.get("open", ()))

    def has(self, position: int) -> bool:
        """Whether the message at this position is confirmed."""
        return position < self._seen and position not in self._open

    def note(self, *, seen: int, unconfirmed: Sequence[int] = ()) -> None:
        """Remember that all messages before ``seen`` are confirmed but those at ``unconfirmed``."""
        self._open = {position for position in self._open if position >= seen} | set(unconfirmed)
        self._seen = max(seen, self._seen)
        if self._store is not None:
            self._store.set(
                KEY, {"digest": self._digest, "since": self.since, "seen": self._seen, "open": sorted(self._open)}
            )


def schedule_once(
    broker: Broker, messages: Sequence[Message], *, on_conflict: OnConflict, memory: TaskMemory
) -> list[Receipt]:
    """Schedule those messages that no earlier try of the task has got confirmed.

    A broker that knows ids keeps or refuses taken ones itself, all messages or none. Any other gets them in batches,
    after all of them were checked.
    """
    if broker.knows_ids:
        return broker.schedule(messages, on_conflict=on_conflict)
    from airflow_delay_provider.brokers.base import Outcome, Receipt

    broker.check_messages(messages)
    receipts: list[Receipt] = []
    for start in range(0, len(messages), BATCH):
        positions = range(start, min(start + BATCH, len(messages)))
        wanted = [position for position in positions if not memory.has(position)]
        try:
            fresh = broker.schedule([messages[position] for position in wanted], on_conflict=on_conflict)
        except DelayError as error:
            refused = set(error.unconfirmed) or {messages[position].id for position in wanted}
            open_positions = [position for position in wanted if messages[position].id in refused]
            memory.note(seen=positions.stop, unconfirmed=open_positions)
            error.unconfirmed = (
                *(messages[position].id for position in open_positions),
                *(message.id for message in messages[positions.stop :]),
            )
            raise
        if wanted:
            memory.note(seen=positions.stop)
        by_position = dict(zip(wanted, fresh, strict=True))
        receipts += [
            by_position.get(position) or Receipt(message_id=messages[position].id, outcome=Outcome.KEPT)
            for position in positions
        ]
    return receipts
