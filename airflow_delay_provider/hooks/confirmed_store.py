"""Schedule the messages of a task once, also on brokers that do not know which ids are taken."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from airflow_delay_provider.domain.exceptions import DelayError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.port import Broker, Receipt
    from airflow_delay_provider.domain.message import Message
    from airflow_delay_provider.domain.schedule import OnConflict

KEY = "delay_confirmed"
#: Messages in one publish, after which the store is updated.
BATCH = 1000


class StateStore(Protocol):
    """Airflow's store for the state of a task, which survives its tries."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the stored value."""
        ...

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        ...


class ConfirmedStore:
    """Remembers which messages of a task are confirmed, and the journal position before the first of them.

    It is updated after each batch. If a worker dies between a confirmation and the update, the next try publishes that
    batch again, with the same ids.
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
        """Return whether the message at this position is confirmed."""
        return position < self._seen and position not in self._open

    def record(self, *, seen: int, unconfirmed: Sequence[int] = ()) -> None:
        """Record that all messages before ``seen`` are confirmed, except those at ``unconfirmed``."""
        self._open = {position for position in self._open if position >= seen} | set(unconfirmed)
        self._seen = max(seen, self._seen)
        if self._store is not None:
            self._store.set(
                KEY, {"digest": self._digest, "since": self.since, "seen": self._seen, "open": sorted(self._open)}
            )


def schedule_once(
    broker: Broker, messages: Sequence[Message], *, on_conflict: OnConflict, confirmed: ConfirmedStore
) -> list[Receipt]:
    """Schedule the messages that no earlier try of the task got confirmed.

    A broker that knows ids handles taken ones itself and schedules all messages or none. For other brokers, all
    messages are checked first and then published in batches.
    """
    if broker.knows_ids:
        return broker.schedule(messages, on_conflict=on_conflict)
    from airflow_delay_provider.brokers.port import Outcome, Receipt

    broker.check_messages(messages)
    receipts: list[Receipt] = []
    for start in range(0, len(messages), BATCH):
        positions = range(start, min(start + BATCH, len(messages)))
        wanted = [position for position in positions if not confirmed.has(position)]
        try:
            fresh = broker.schedule([messages[position] for position in wanted], on_conflict=on_conflict)
        except DelayError as error:
            refused = set(error.unconfirmed) or {messages[position].id for position in wanted}
            open_positions = [position for position in wanted if messages[position].id in refused]
            confirmed.record(seen=positions.stop, unconfirmed=open_positions)
            error.unconfirmed = (
                *(messages[position].id for position in open_positions),
                *(message.id for message in messages[positions.stop :]),
            )
            raise
        if wanted:
            confirmed.record(seen=positions.stop)
        by_position = dict(zip(wanted, fresh, strict=True))
        receipts += [
            by_position.get(position) or Receipt(message_id=messages[position].id, outcome=Outcome.KEPT)
            for position in positions
        ]
    return receipts
