"""Triggers of tasks that wait for messages."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException
from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_delay_provider.domain.clock import ONE_MS
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.hooks.task import cancel_in_time
from airflow_delay_provider.triggers.broker_thread import pause_after_deferral
from airflow_delay_provider.triggers.channel_watch import ChannelWatch, Watch
from airflow_delay_provider.triggers.journal_tail import JournalTail, warn_while_not_dispatched

if TYPE_CHECKING:
    from airflow_delay_provider.domain.lifecycle import JournalEntry

#: Time to look up outcomes for a trigger that starts after its time-out.
LOOK_UP_SECONDS = 10.0
#: An event for more ids than this names only the messages that were not dispatched.
MAX_NAMED_OUTCOMES = 100


class MessageDispatchedTrigger(BaseTrigger):
    """Fires once when every message has an outcome: dispatched, cancelled or dead-lettered.

    Airflow stores the arguments in plain text, so they hold message ids and no content.

    :param message_ids: ids of the messages.
    :param delay_conn_id: connection of the broker.
    :param hold: ``broker`` or ``ledger``; None if the connection decides.
    :param since: journal position from before the messages were scheduled.
    :param cancel_on_kill: cancel the waiting messages if a user stops the task.
    :param ledger_id: id of the ledger that stores the messages, if one does.
    :param give_up_at: time (ISO-8601) at which the trigger fires anyway, with an event that says so.
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
        await pause_after_deferral(self, began=began)
        if entries is None:
            yield _event({"timed_out": True, "since": self.since})
        else:
            yield _event(describe_outcomes(self.message_ids, entries))

    async def _wait(self, tail: JournalTail) -> Mapping[str, JournalEntry] | None:
        """Return the outcomes of the messages; None after the time-out."""
        try:
            async with asyncio.timeout(self._patience()) as limit, warn_while_not_dispatched(tail, self):
                return await tail.outcomes(self.message_ids, since=self.since, ledger_id=self.ledger_id)
        except TimeoutError:
            if limit.expired():
                return None
            raise

    def _patience(self) -> float | None:
        """Return the seconds until the time-out, with some left to look up outcomes if it has passed."""
        if self.give_up_at is None:
            return None
        remaining = datetime.fromisoformat(self.give_up_at) - datetime.now(UTC)
        return max(remaining.total_seconds(), LOOK_UP_SECONDS)

    async def on_kill(self) -> None:
        if self.cancel_on_kill:
            too_late = await asyncio.to_thread(self._cancel)
            cancelled = len(self.message_ids) - len(too_late)
            self.log.info("The task was stopped: cancelled %d messages, too late for %d", cancelled, len(too_late))

    def _cancel(self) -> list[str]:
        hook = DelayHook(self.delay_conn_id, hold=self.hold)
        try:
            return cancel_in_time(hook.get_conn(), self.message_ids)
        finally:
            hook.close()


class ChannelTrigger(BaseTrigger):
    """Fires once when the channel has a message that passes the filter; the message stays in the channel.

    Airflow stores the event in plain text, so it holds the message id and no content.

    :param channel: queue, topic or embedded channel.
    :param delay_conn_id: connection of the broker.
    :param filter: dotted path of a function that gets a ``Message`` and returns whether to take it.
    :param look_ahead: number of messages at the head of the channel that the filter sees.
    :param give_up_at: time-out of the sensor (ISO-8601), returned in the event.
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
            # The triggerer may be stopping. Release held messages first: a lost connection counts as a delivery.
            await watch.release()
            raise
        await pause_after_deferral(self, began=began)
        yield _event({"message_id": message_id, "give_up_at": self.give_up_at})


def _event(payload: dict[str, Any]) -> TriggerEvent:
    return TriggerEvent(payload)  # type: ignore[no-untyped-call]  # Airflow leaves it untyped


def describe_outcomes(message_ids: Sequence[str], entries: Mapping[str, JournalEntry]) -> dict[str, Any]:
    """Return the event for these outcomes: counts, and each message by id; of many, only those not dispatched."""
    named = {message_id: _describe(entries[message_id]) for message_id in dict.fromkeys(message_ids)}
    counts = dict(Counter(outcome["change"] for outcome in named.values()))
    if len(named) > MAX_NAMED_OUTCOMES:
        named = {each: outcome for each, outcome in named.items() if outcome["change"] != Change.DISPATCHED}
    return {"counts": counts, "outcomes": named}


def require_dispatched(event: Mapping[str, Any]) -> None:
    """Fail the task if one of its messages will never be dispatched.

    It fails without retries, which would end the same way. After fixing the cause you can replay dead letters. If the
    ledger holds the messages, clearing the task schedules them again.
    """
    missed = {each: outcome for each, outcome in event["outcomes"].items() if outcome["change"] != Change.DISPATCHED}
    if missed:
        shown = ", ".join(f"{each} {outcome['change']}" for each, outcome in list(missed.items())[:10])
        more = f" and {len(missed) - 10} more" if len(missed) > 10 else ""
        text = f"{len(missed)} of {sum(event['counts'].values())} messages were not dispatched ({shown}{more});"
        if any(outcome["change"] == Change.PARKED for outcome in missed.values()):
            text += (
                " the broker keeps parked messages, whose channel is gone: create the channel, run"
                " `airflow delay topology replay-parked`, then clear this task;"
            )
        raise AirflowFailException(
            f"{text} replay dead letters with `airflow delay replay`, or clear this task if the ledger holds them;"
            " cancelled messages need a new message_id"
        )


def _describe(entry: JournalEntry) -> dict[str, Any]:
    described: dict[str, Any] = {
        "change": entry.change.value,
        "at": entry.at.isoformat(),
        "lateness_ms": None if entry.lateness is None else entry.lateness // ONE_MS,
    }
    return described | ({"reason": entry.reason} if entry.reason else {})
