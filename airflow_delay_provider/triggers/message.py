"""Triggers of tasks that wait for messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_delay_provider.domain.journal import FROM_THE_START
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.hooks.message_ids import cancel_in_time
from airflow_delay_provider.triggers.channel import ChannelWatch, Watch
from airflow_delay_provider.triggers.journal import JournalTail
from airflow_delay_provider.triggers.outcomes import describe_outcomes
from airflow_delay_provider.triggers.settling import let_deferral_settle
from airflow_delay_provider.triggers.warning import warning_of_dispatchers

if TYPE_CHECKING:
    from airflow_delay_provider.domain.journal import JournalEntry

#: What a trigger that starts when its time is over gets to find out how its messages ended.
LOOK_UP_SECONDS = 10.0


class MessageDispatchedTrigger(BaseTrigger):
    """Fires once when every message was dispatched, cancelled or given up.

    Its arguments are stored in plain text by Airflow, so they name the messages and hold none of their content.

    :param message_ids: the messages.
    :param delay_conn_id: the connection of their broker.
    :param hold: who keeps their wait; None is what the connection says.
    :param since: journal position from before they were scheduled.
    :param cancel_on_kill: cancel those that still wait when a user ends the task.
    :param ledger_id: the ledger that holds them, where one does.
    :param give_up_at: when the task has waited long enough (ISO-8601); the event then says so.
    """

    def __init__(
        self,
        *,
        message_ids: Sequence[str],
        delay_conn_id: str = DEFAULT_CONN_ID,
        hold: str | None = None,
        since: str = FROM_THE_START,
        cancel_on_kill: bool = False,
        ledger_id: str | None = None,
        give_up_at: str | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Airflow leaves it untyped
        self.message_ids = list(message_ids)
        self.delay_conn_id = delay_conn_id
        self.hold = hold
        self.since = since
        self.cancel_on_kill = cancel_on_kill
        self.ledger_id = ledger_id
        self.give_up_at = give_up_at

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__module__}.{type(self).__qualname__}", {
            "message_ids": self.message_ids,
            "delay_conn_id": self.delay_conn_id,
            "hold": self.hold,
            "since": self.since,
            "cancel_on_kill": self.cancel_on_kill,
            "ledger_id": self.ledger_id,
            "give_up_at": self.give_up_at,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        began = time.monotonic()
        with JournalTail.shared(self.delay_conn_id, hold=self.hold) as tail:
            entries = await self._wait(tail)
        await let_deferral_settle(self, began=began)
        if entries is None:
            yield _event({"timed_out": True, "since": self.since})
        else:
            yield _event(describe_outcomes(self.message_ids, entries))

    async def _wait(self, tail: JournalTail) -> Mapping[str, JournalEntry] | None:
        """Return how the messages ended, None when the time is over."""
        try:
            async with asyncio.timeout(self._patience()) as limit, warning_of_dispatchers(tail, self):
                return await tail.outcomes(self.message_ids, since=self.since, ledger_id=self.ledger_id)
        except TimeoutError:
            if limit.expired():
                return None
            raise

    def _patience(self) -> float | None:
        """Return the seconds that remain; also after the end of the time what has happened already is looked up."""
        if self.give_up_at is None:
            return None
        remaining = datetime.fromisoformat(self.give_up_at) - datetime.now(UTC)
        return max(remaining.total_seconds(), LOOK_UP_SECONDS)

    async def on_kill(self) -> None:
        if self.cancel_on_kill:
            too_late = await asyncio.to_thread(self._cancel)
            cancelled = len(self.message_ids) - len(too_late)
            self.log.info("The task was ended: cancelled %d messages, %d too late", cancelled, len(too_late))

    def _cancel(self) -> list[str]:
        hook = DelayHook(self.delay_conn_id, hold=self.hold)
        try:
            return cancel_in_time(hook.get_conn(), self.message_ids)
        finally:
            hook.close()


class ChannelTrigger(BaseTrigger):
    """Fires once when a message that passes the filter can be received; the message stays in its channel.

    The event names the message and holds none of its content, which Airflow would store in plain text.

    :param channel: the channel.
    :param delay_conn_id: the connection of its broker.
    :param filter: dotted path of a function that gets a ``Message`` and says whether it is the one.
    :param look_ahead: how many messages at the head of the channel are looked at.
    :param give_up_at: when the sensor's time is over (ISO-8601); handed back in the event.
    """

    def __init__(
        self,
        *,
        channel: str,
        delay_conn_id: str = DEFAULT_CONN_ID,
        filter: str | None = None,
        look_ahead: int = 100,
        give_up_at: str | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Airflow leaves it untyped
        self.watch = Watch(channel=channel, filter=filter, look_ahead=look_ahead)
        self.delay_conn_id = delay_conn_id
        self.give_up_at = give_up_at

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__module__}.{type(self).__qualname__}", {
            "channel": self.watch.channel,
            "delay_conn_id": self.delay_conn_id,
            "filter": self.watch.filter,
            "look_ahead": self.watch.look_ahead,
            "give_up_at": self.give_up_at,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        began = time.monotonic()
        try:
            with ChannelWatch.shared(self.delay_conn_id) as watch:
                message_id = await watch.message_id(self.watch)
        except asyncio.CancelledError:
            # The triggerer may be about to end: what is held goes back first, since a lost connection is counted.
            await watch.give_back()
            raise
        await let_deferral_settle(self, began=began)
        yield _event({"message_id": message_id, "give_up_at": self.give_up_at})


def _event(payload: dict[str, Any]) -> TriggerEvent:
    return TriggerEvent(payload)  # type: ignore[no-untyped-call]  # Airflow leaves it untyped
