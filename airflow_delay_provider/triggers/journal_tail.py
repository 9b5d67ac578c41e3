"""Reads a journal once for all triggers that wait for outcomes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.domain.lifecycle import FINAL_CHANGES, is_full_page
from airflow_delay_provider.hooks.delay import find_dispatcher_warning, ledger_id_of
from airflow_delay_provider.triggers.broker_thread import BrokerThread

if TYPE_CHECKING:
    from airflow.triggers.base import BaseTrigger

    from airflow_delay_provider.brokers.port import Broker
    from airflow_delay_provider.domain.lifecycle import JournalEntry
    from airflow_delay_provider.hooks.delay import DelayHook

ItemT = TypeVar("ItemT")

READ_AT_ONCE = 1000
#: Entries passed to the event loop at once, so that it never stalls.
SLICE = 200
#: How often all awaited ids are looked up again, in case an entry was missed.
RECONCILE_SECONDS = 30.0
#: How often the thread checks for a dispatcher.
DISPATCHER_CHECK_SECONDS = 10.0
#: How often a trigger reads the result of that check.
WARNING_CHECK_SECONDS = 5.0
#: How often a trigger repeats the same warning.
WARNING_REPEAT_SECONDS = 600.0


@dataclass(eq=False, slots=True)
class _Waiter:
    missing: set[str]
    done: asyncio.Future[Mapping[str, JournalEntry]]
    found: dict[str, JournalEntry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Search:
    message_ids: Sequence[str]
    #: None for the position of the last reconciliation.
    since: str | None
    #: Trigger that waits, and ledger that stores its messages, if known.
    waiter: _Waiter | None = None
    ledger_id: str | None = None


class JournalTail(BrokerThread):
    """Wakes triggers as the journal records the outcomes of their messages.

    No outcome is missed: a trigger is registered before earlier entries are searched, so an outcome is either found by
    that search or among the entries read after it. A search that fails is repeated.
    """

    def __init__(self, conn_id: str, loop: asyncio.AbstractEventLoop, *, hold: str | None = None) -> None:
        super().__init__(conn_id, loop, hold=hold)
        self.interval = _poll_interval()
        self._waiters: dict[str, list[_Waiter]] = {}
        self._searches: deque[_Search] = deque()
        #: Those that have not succeeded yet.
        self._begun: list[_Search] = []
        self._position: str | None = None
        self._reconciled: str | None = None
        #: Whether a search for all awaited ids waits for the broker.
        self._is_reconciling = False
        self._ledger_id: str | None = None
        self._dispatchers_checked_at: float | None = None
        #: Why nothing dispatches the awaited messages; None if no problem is known.
        self.dispatcher_warning: str | None = None
        self._timer = loop.call_later(RECONCILE_SECONDS, self._reconcile)

    async def outcomes(
        self, message_ids: Sequence[str], *, since: str, ledger_id: str | None = None
    ) -> Mapping[str, JournalEntry]:
        """Wait until all these messages are dispatched, cancelled or dead-lettered, and return their outcomes.

        :param ledger_id: id of the ledger that stores them. Raises if this thread reads another ledger, which would
            never record their outcomes.
        """
        if not message_ids:
            return {}
        waiter = _Waiter(set(message_ids), self.loop.create_future())
        for message_id in waiter.missing:
            self._waiters.setdefault(message_id, []).append(waiter)
        self._searches.append(_Search(tuple(message_ids), since, waiter, ledger_id))
        self.poll_now()
        try:
            return await waiter.done
        finally:
            for message_id in waiter.missing:
                self._forget(message_id, waiter)

    def stop(self) -> None:
        self._timer.cancel()
        super().stop()

    def poll(self, hook: DelayHook) -> bool:
        broker = hook.get_conn()
        # Read the position before the first search of earlier entries, so that the two overlap.
        if self._position is None:
            self._position = self._reconciled = broker.journal_end()
        while self._searches:
            self._begun.append(self._searches.popleft())
        while self._begun:
            self._begun = self._look_back(hook, broker)
        self._check_dispatchers(hook)
        entries = broker.read_journal(after=self._position, limit=READ_AT_ONCE)
        self._pass_on(entry for entry in entries if entry.change in FINAL_CHANGES)
        if entries:
            self._position = entries[-1].position
        return is_full_page(entries, READ_AT_ONCE)

    def fail(self, error: Exception) -> None:
        for waiters in self._waiters.values():
            for waiter in waiters:
                _refuse(waiter, error)

    def _require_ledger(self, hook: DelayHook, search: _Search) -> None:
        if search.ledger_id is None:
            return
        if self._ledger_id is None:
            self._ledger_id = ledger_id_of(hook)
        if search.waiter is not None and self._ledger_id != search.ledger_id:
            self.call_on_loop(_refuse, search.waiter, _other_ledger(hook))

    def _check_dispatchers(self, hook: DelayHook) -> None:
        checked_at, now = self._dispatchers_checked_at, time.monotonic()
        if checked_at is None or now - checked_at >= DISPATCHER_CHECK_SECONDS:
            self.dispatcher_warning = find_dispatcher_warning(hook)
            self._dispatchers_checked_at = now

    def _look_back(self, hook: DelayHook, broker: Broker) -> list[_Search]:
        """Search for earlier outcomes of all new waiters at once, as thousands may come together after a restart.

        Return those of waiters for a message that another one awaits from another position on.
        """
        position, reconciled, later = self._position, self._reconciled, list[_Search]()
        since, ends_reconciling = dict[str, str](), False
        for search in self._begun:
            self._require_ledger(hook, search)
            begin = (self._reconciled or "") if search.since is None else search.since
            if all(since.get(each, begin) == begin for each in search.message_ids):
                since |= dict.fromkeys(search.message_ids, begin)
                reconciled = position if search.since is None else reconciled
                ends_reconciling = ends_reconciling or search.since is None
            else:
                later.append(search)
        if since:
            self._pass_on(broker.find_outcomes_of_each(since).values())
        self._reconciled = reconciled
        if ends_reconciling:
            self._is_reconciling = False
        return later

    def _pass_on(self, entries: Iterable[JournalEntry]) -> None:
        # A waiter that comes after this check looks back itself. One of many messages keeps outcomes until the last.
        awaited = (entry.without_message() for entry in entries if entry.message_id in self._waiters)
        for batch in _batches(awaited, SLICE):
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
        # During an outage, the first search waits; later waiters look back themselves.
        if not self._is_reconciling:
            self._is_reconciling = True
            self._searches.append(_Search(tuple(self._waiters), None))
        self._timer = self.loop.call_later(RECONCILE_SECONDS, self._reconcile)


@asynccontextmanager
async def warn_while_not_dispatched(tail: JournalTail, trigger: BaseTrigger) -> AsyncIterator[None]:
    """Log a warning while the body waits and no dispatcher runs; repeat it now and then."""
    # A task that is created here logs to the log of its trigger.
    warnings = asyncio.create_task(_log_warnings(tail, trigger))
    try:
        yield
    finally:
        warnings.cancel()


async def _log_warnings(tail: JournalTail, trigger: BaseTrigger) -> None:
    warned_at: float | None = None
    while True:
        await asyncio.sleep(WARNING_CHECK_SECONDS)
        warning, now = tail.dispatcher_warning, time.monotonic()
        if warning is None and warned_at is not None:
            trigger.log.info("A dispatcher serves the awaited messages again")
            warned_at = None
        elif warning is not None and (warned_at is None or now - warned_at >= WARNING_REPEAT_SECONDS):
            trigger.log.warning("Nothing dispatches the messages that this task waits for: %s", warning)
            warned_at = now


def _refuse(waiter: _Waiter, error: Exception) -> None:
    if not waiter.done.done():
        waiter.done.set_exception(error)


def _other_ledger(hook: DelayHook) -> ConfigurationError:
    return ConfigurationError(
        f"ledger_url: this triggerer reads {hook.get_ledger().name}, but the task stored its messages in another"
        " ledger; set [delay] ledger_url to the same PostgreSQL database on all machines"
    )


def _batches(items: Iterable[ItemT], size: int) -> Iterable[list[ItemT]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _poll_interval() -> float:
    from airflow.sdk.configuration import conf

    seconds: float = conf.getfloat("delay", "journal_poll_interval", fallback=0.2)
    return seconds
