"""Shared by the tasks of this package: open the hook, schedule messages once, cancel them, decide about retries."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from airflow_delay_provider.domain.exceptions import (
    DelayError,
    InvalidMessageError,
    LifecycleError,
    NoRecallError,
    UnknownMessageError,
)
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change
from airflow_delay_provider.domain.message import Origin
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.metrics import AirflowMetrics, schedule_and_count

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delay_provider.brokers.port import Broker, Receipt
    from airflow_delay_provider.domain.arguments import OnConflict
    from airflow_delay_provider.domain.message import Message

log = logging.getLogger(__name__)

#: Where the state of a task holds the confirmed messages.
KEY = "delay_confirmed"
#: Messages in one publish, after which the store is updated.
BATCH = 1000


@contextmanager
def open_hook(conn_id: str, *, hold: str | None = None) -> Iterator[DelayHook]:
    """Open a hook for a task and close it at the end; see :func:`translate_errors`."""
    with translate_errors(), closing(DelayHook(conn_id, hold=hold)) as hook:
        yield hook


@contextmanager
def translate_errors() -> Iterator[None]:
    """Fail the task without retries for errors in the DAG; let Airflow retry all others.

    A broker or database may come back. So may a missing connection, which Airflow also reports if its API is down.
    """
    from airflow.sdk.exceptions import AirflowFailException

    try:
        yield
    except (InvalidMessageError, LifecycleError) as error:
        AirflowMetrics().failed(type(error).__name__)
        # The message is enough; a traceback through our validation would hide it in the task's log.
        raise AirflowFailException(str(error)) from None
    except DelayError as error:
        AirflowMetrics().failed(type(error).__name__)
        raise


def origin_of(context: Context) -> Origin:
    """Return the running task instance as the origin of a message."""
    ti = context["ti"]
    map_index = -1 if ti.map_index is None else ti.map_index
    return Origin(dag_id=ti.dag_id, run_id=ti.run_id, task_id=ti.task_id, map_index=map_index)


def parse_message_ids(value: Any) -> list[str]:
    """Return the distinct ids of one id, a list of ids, or the output of mapped tasks (a list of either)."""
    return list(dict.fromkeys(_each_id(value)))


def _each_id(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        if value.startswith(("[", "(")) or not value:
            raise InvalidMessageError(
                "message_ids",
                f"{value!r} is a list that a template turned into text" if value else "is empty",
                "pass the output of the task itself, or set render_template_as_native_obj=True on the DAG",
            )
        yield value
    elif isinstance(value, Iterable):
        for item in value:
            yield from _each_id(item)
    else:
        raise InvalidMessageError(
            "message_ids", f"{value!r} is not an id", "pass an id, a list of ids or a task's output"
        )


def cancel_in_time(broker: Broker, message_ids: Sequence[str]) -> list[str]:
    """Cancel the messages that are still waiting and return the ids of the others; raise for an unknown id."""
    waiting, too_late = list(message_ids), list[str]()
    while waiting:
        try:
            broker.cancel(waiting)
            break
        except (UnknownMessageError, NoRecallError):
            raise
        except LifecycleError as error:
            # The error names one message. Look up the others at once, to avoid one round for each.
            outcomes = broker.find_outcomes(waiting, since=FROM_THE_START)
            late = {each for each, entry in outcomes.items() if entry.change is not Change.CANCELLED} | {
                error.message_id
            }
            too_late += [each for each in waiting if each in late]
            waiting = [each for each in waiting if each not in late]
    return too_late


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

    def __init__(self, store: StateStore | None, message_ids: Sequence[str], *, key: str = KEY) -> None:
        self._store = store
        self._key = key
        self._digest = sha256("\n".join(message_ids).encode()).hexdigest()
        known = store.get(key) if store is not None else None
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
                self._key, {"digest": self._digest, "since": self.since, "seen": self._seen, "open": sorted(self._open)}
            )


def schedule_once(
    broker: Broker, messages: Sequence[Message], *, on_conflict: OnConflict, confirmed: ConfirmedStore
) -> list[Receipt]:
    """Schedule the messages that no earlier try of the task got confirmed.

    A broker that knows ids handles taken ones itself and schedules all messages or none. For other brokers, all
    messages are checked first and then published in batches.
    """
    if broker.knows_ids:
        return schedule_and_count(broker, messages, on_conflict=on_conflict)
    from airflow_delay_provider.brokers.port import Outcome, Receipt

    broker.check_messages(messages)
    if _forgets_on_success():
        log.warning(
            "[state_store] clear_on_success is set, so Airflow forgets what this task has scheduled when it succeeds."
            " If you clear it then, it schedules its messages again. Unset the option, or use hold='ledger'"
        )
    receipts: list[Receipt] = []
    for start in range(0, len(messages), BATCH):
        positions = range(start, min(start + BATCH, len(messages)))
        wanted = [position for position in positions if not confirmed.has(position)]
        try:
            fresh = schedule_and_count(broker, [messages[position] for position in wanted], on_conflict=on_conflict)
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


def _forgets_on_success() -> bool:
    from airflow.sdk.configuration import conf

    return bool(conf.getboolean("state_store", "clear_on_success", fallback=False))


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a hook in a running task; a retried task makes the same calls in the same order."""

    origin: Origin
    #: Counts from 0 whenever the task starts or is resumed.
    number: int
    #: The method with which the task was resumed after a deferral, and nothing before.
    method: str
    store: StateStore | None

    @classmethod
    def begin(cls) -> Call | None:
        """Return the next call of the task that runs in this process; None outside of tasks."""
        from airflow.sdk import get_current_context

        try:
            context = get_current_context()
        except RuntimeError:
            return None
        origin = origin_of(context)
        method = _resumed_in(context["ti"])
        run = (origin, context["ti"].try_number, method)
        number = _CALLS[run]
        _CALLS[run] += 1
        return cls(origin=origin, number=number, method=method, store=context.get("task_state_store"))

    @property
    def message_id(self) -> str:
        """The id of its message; never that of a message of an operator."""
        return self.origin.message_id(f"{self.method} call {self.number}".strip())

    def confirmed(self, broker: Broker, message_id: str) -> ConfirmedStore:
        """Return what earlier tries of the task know of this call."""
        store = None if broker.knows_ids else self.store
        return ConfirmedStore(store, [message_id], key="_".join(filter(None, (KEY, self.method, str(self.number)))))


#: Calls of hooks so far, by task instance, try and method: ``dag.test()`` runs many tasks in one process.
_CALLS: Counter[tuple[Origin, int, str]] = Counter()


def _resumed_in(ti: Any) -> str:
    """Return the method with which a deferred task goes on, in a process of its own; empty at its start."""
    return getattr(getattr(ti, "_ti_context_from_server", None), "next_method", None) or ""
