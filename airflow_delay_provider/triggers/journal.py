"""The shared journal tail: any number of waiters, one reader."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from airflow_delay_provider.domain.lifecycle import FINAL_CHANGES
from airflow_delay_provider.exceptions import ConfigurationError
from airflow_delay_provider.hooks.dispatchers import find_dispatcher_warning, ledger_id_of
from airflow_delay_provider.triggers.broker_thread import BrokerThread

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.base import Broker
    from airflow_delay_provider.domain.journal import JournalEntry
    from airflow_delay_provider.hooks.delay import DelayHook

ItemT = TypeVar("ItemT")

READ_AT_ONCE = 1000
#: Entries handed to the event loop in one go, so that it never stalls.
SLICE = 200
#: How often all waiting ids are looked up again, should an entry ever have been overlooked.
RECONCILE_SECONDS = 30.0
#: How often the ledger is asked whether a dispatcher runs.
DISPATCHER_LOOK_SECONDS = 10.0


@dataclass(eq=False, slots=True)
class _Waiter:
    missing: set[str]
    done: asyncio.Future[Mapping[str, JournalEntry]]
    found: dict[str, JournalEntry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _LookBack:
    message_ids: Sequence[str]
    #: None is the position of the reconciliation before.
    since: str | None
    #: Who asks, and which ledger holds the messages; None is not known.
    waiter: _Waiter | None = None
    ledger_id: str | None = None


class JournalTail(BrokerThread):
    """Wakes waiters by message id as the journal grows.

    Nothing is missed: a waiter is registered before its past is looked up, so an outcome is either in that look-back
    or among the entries that are read after it. A look-back that fails is asked again.
    """

    def __init__(self, conn_id: str, loop: asyncio.AbstractEventLoop, *, hold: str | None = None) -> None:
        super().__init__(conn_id, loop, hold=hold)
        self.interval = _poll_interval()
        self._waiters: dict[str, list[_Waiter]] = {}
        self._look_backs: deque[_LookBack] = deque()
        self._position: str | None = None
        self._reconciled: str | None = None
        self._ledger_id: str | None = None
        self._dispatchers_seen_at: float | None = None
        #: Why the awaited messages would not be dispatched; None is nothing known.
        self.dispatcher_warning: str | None = None
        self._timer = loop.call_later(RECONCILE_SECONDS, self._reconcile)

    async def outcomes(
        self, message_ids: Sequence[str], *, since: str, ledger_id: str | None = None
    ) -> Mapping[str, JournalEntry]:
        """Wait until all these messages were dispatched, cancelled or given up, and return how each ended.

        :param ledger_id: the ledger that holds them. Another one would never tell of them, so it is refused.
        """
        if not message_ids:
            return {}
        waiter = _Waiter(set(message_ids), self.loop.create_future())
        for message_id in waiter.missing:
            self._waiters.setdefault(message_id, []).append(waiter)
        self._look_backs.append(_LookBack(tuple(message_ids), since, waiter, ledger_id))
        self.look_now()
        try:
            return await waiter.done
        finally:
            for message_id in waiter.missing:
                self._forget(message_id, waiter)

    def stop(self) -> None:
        self._timer.cancel()
        super().stop()

    def look(self, hook: DelayHook) -> bool:
        broker = hook.get_conn()
        # The position is taken before the first look-back, so that the two overlap.
        if self._position is None:
            self._position = self._reconciled = broker.journal_end()
        while self._look_backs:
            self._require_ledger(hook, self._look_backs[0])
            self._answer(broker, self._look_backs[0])
            self._look_backs.popleft()
        self._look_for_dispatchers(hook)
        entries = broker.read_journal(after=self._position, limit=READ_AT_ONCE)
        self._hand_over(entry for entry in entries if entry.change in FINAL_CHANGES)
        if entries:
            self._position = entries[-1].position
        return len(entries) == READ_AT_ONCE

    def fail(self, error: Exception) -> None:
        for waiters in self._waiters.values():
            for waiter in waiters:
                _refuse(waiter, error)

    def _require_ledger(self, hook: DelayHook, question: _LookBack) -> None:
        if question.ledger_id is None:
            return
        if self._ledger_id is None:
            self._ledger_id = ledger_id_of(hook)
        if question.waiter is not None and self._ledger_id != question.ledger_id:
            self.call_on_loop(_refuse, question.waiter, _other_ledger(hook))

    def _look_for_dispatchers(self, hook: DelayHook) -> None:
        seen_at, now = self._dispatchers_seen_at, time.monotonic()
        if seen_at is None or now - seen_at >= DISPATCHER_LOOK_SECONDS:
            self.dispatcher_warning = find_dispatcher_warning(hook)
            self._dispatchers_seen_at = now

    def _answer(self, broker: Broker, question: _LookBack) -> None:
        since, position = question.since, self._position
        if since is None:
            since = self._reconciled or ""
        for batch in _batches(question.message_ids, READ_AT_ONCE):
            self._hand_over(broker.find_outcomes(batch, since=since).values())
        if question.since is None:
            self._reconciled = position

    def _hand_over(self, entries: Iterable[JournalEntry]) -> None:
        for batch in _batches(entries, SLICE):
            self.call_on_loop(self._wake, batch)

    def _wake(self, entries: Iterable[JournalEntry]) -> None:
        for entry in entries:
            for waiter in self._waiters.pop(entry.message_id, ()):
                waiter.missing.discard(entry.message_id)
                waiter.found[entry.message_id] = entry
                if not waiter.missing and not waiter.done.done():
                    waiter.done.set_result(waiter.found)

    def _forget(self, message_id: str, waiter: _Waiter) -> None:
        others = [other for other in self._waiters.get(message_id, ()) if other is not waiter]
        if others:
            self._waiters[message_id] = others
        else:
            self._waiters.pop(message_id, None)

    def _reconcile(self) -> None:
        self._look_backs.append(_LookBack(tuple(self._waiters), None))
        self._timer = self.loop.call_later(RECONCILE_SECONDS, self._reconcile)


def _refuse(waiter: _Waiter, error: Exception) -> None:
    if not waiter.done.done():
        waiter.done.set_exception(error)


def _other_ledger(hook: DelayHook) -> ConfigurationError:
    return ConfigurationError(
        f"ledger_url: the task has stored its messages in another ledger than {hook.get_ledger().name}, which this"
        " triggerer reads; set [delay] ledger_url to the same PostgreSQL database on all machines"
    )


def _batches(items: Iterable[ItemT], size: int) -> Iterable[list[ItemT]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _poll_interval() -> float:
    from airflow.sdk.configuration import conf

    seconds: float = conf.getfloat("delay", "journal_poll_interval", fallback=0.2)
    return seconds
