"""Operators that schedule and control messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import TaskDeferralTimeout

from airflow_delay_provider.domain.journal import FROM_THE_START
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.domain.schedule import (
    OnConflict,
    compose_message,
    parse_choice,
    parse_delay,
    resolve_deliver_at,
)
from airflow_delay_provider.exceptions import InvalidMessageError, WaitTimeoutError
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.counting import count_confirmed
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.hooks.dispatchers import describe_waiting, find_dispatcher_warning, ledger_id_of
from airflow_delay_provider.hooks.failures import failing_at_once
from airflow_delay_provider.hooks.message_ids import cancel_in_time, parse_message_ids
from airflow_delay_provider.hooks.remembering import TaskMemory, schedule_once
from airflow_delay_provider.links import DelayedMessageLink, message_url
from airflow_delay_provider.operators.origin import origin_of
from airflow_delay_provider.triggers.message import MessageDispatchedTrigger
from airflow_delay_provider.triggers.outcomes import describe_outcomes, require_dispatched

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delay_provider.brokers.base import Receipt

_TIME_FIELDS = ("deliver_at", "deliver_after")
_MESSAGE_FIELDS = ("channel", "payload", *_TIME_FIELDS, "message_id", "key", "headers", "content_type", "priority")
_SETTINGS = ("delay_conn_id", "hold", "on_conflict", "on_past", "wait_timeout")
#: Longer than the trigger's own time-out, for when no triggerer runs that could notice it.
_TRIGGER_GRACE = timedelta(minutes=1)


class ScheduleMessageOperator(BaseOperator):
    """Schedule one message or many, all or none, and optionally wait until they are dispatched.

    Ids derive from dag, run, task, map index and position unless given, so a retried or cleared task schedules nothing
    twice. Waiting takes no worker slot. Returns the id, or the list of ids when ``messages`` is given.

    :param channel: where to (templated, as all fields of the message).
    :param payload: bytes, text, or data that is written as JSON.
    :param deliver_at: aware datetime or ISO-8601 text, such as ``"{{ data_interval_end }}"``.
    :param deliver_after: timedelta or seconds from now; with neither, the message is sent now.
    :param message_id: the id, instead of the derived one.
    :param key: messages of one channel and key that are due in order are delivered in order.
    :param headers: text by text.
    :param content_type: instead of the payload's natural one.
    :param priority: 0 to 255.
    :param messages: many messages as dicts of the fields above, which then are the defaults of each.
    :param delay_conn_id: the connection of the broker.
    :param hold: who keeps the wait: ``broker``, or ``ledger`` to be able to cancel and move messages on any broker;
        None is what the connection says.
    :param on_conflict: what to do when an id is taken: ``keep``, ``fail`` or ``replace``.
    :param on_past: what to do with a time that has passed: ``deliver`` or ``fail``.
    :param wait_for_dispatch: succeed only when all were dispatched; a cancelled or given-up message fails the task.
    :param wait_timeout: with ``wait_for_dispatch``, timedelta or seconds after which the task fails. The messages stay
        scheduled: a retried or cleared task waits for the same ones again. None waits as long as it takes.
    :param cancel_on_kill: cancel what still waits when a user ends the task. Airflow tells a deferred task of its end
        only once a triggerer has taken it over, about a second after it was deferred.
    """

    template_fields: Sequence[str] = (*_MESSAGE_FIELDS, "messages", *_SETTINGS)
    template_fields_renderers: ClassVar[dict[str, str]] = {"payload": "json", "headers": "json", "messages": "json"}
    operator_extra_links = (DelayedMessageLink(),)
    ui_color = "#dfeaf7"

    def __init__(
        self,
        *,
        channel: str | None = None,
        payload: Any = None,
        deliver_at: datetime | str | None = None,
        deliver_after: timedelta | float | str | None = None,
        message_id: str | None = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        content_type: str | None = None,
        priority: int | str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        delay_conn_id: str = DEFAULT_CONN_ID,
        hold: str | None = None,
        on_conflict: str = "keep",
        on_past: str = "deliver",
        wait_for_dispatch: bool = False,
        wait_timeout: timedelta | float | str | None = None,
        cancel_on_kill: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.channel = channel
        self.payload = payload
        self.deliver_at = deliver_at
        self.deliver_after = deliver_after
        self.message_id = message_id
        self.key = key
        self.headers = headers
        self.content_type = content_type
        self.priority = priority
        self.messages = messages
        self.delay_conn_id = delay_conn_id
        self.hold = hold
        self.on_conflict = on_conflict
        self.on_past = on_past
        self.wait_for_dispatch = wait_for_dispatch
        self.wait_timeout = wait_timeout
        self.cancel_on_kill = cancel_on_kill
        #: The address for the link; None until this process has tried to schedule.
        self.message_link: str | None = None
        self._confirmed_ids: list[str] = []

    def execute(self, context: Context) -> str | list[str]:
        self.message_link = ""
        with failing_at_once(), closing(DelayHook(self.delay_conn_id, hold=self.hold)) as hook:
            broker = hook.get_conn()
            if self.cancel_on_kill and not broker.can_recall:
                raise InvalidMessageError(
                    "cancel_on_kill", "this broker holds messages itself and gives none back", 'add hold="ledger"'
                )
            began = broker.clock.now()
            messages = self._compose(context, now=began)
            patience = self._patience(messages, now=began)
            ids = [message.id for message in messages]
            policy = parse_choice("on_conflict", OnConflict, self.on_conflict)
            memory = TaskMemory(None if broker.knows_ids else context.get("task_state_store"), ids)
            if memory.since is None:
                # Taken before scheduling: whatever happens to the messages lies behind it.
                memory.since = broker.journal_end() if self.wait_for_dispatch else FROM_THE_START
            since = memory.since
            receipts = schedule_once(broker, messages, on_conflict=policy, memory=memory) if messages else []
            self._confirmed_ids = ids
            self._tell(context, messages, receipts)
            self._warn_if_not_served(hook, receipts)
            if not self.wait_for_dispatch:
                return self._result(ids)
            if broker.knows_ids and any(receipt.outcome == "kept" for receipt in receipts):
                # An earlier try scheduled them, so they may have ended before this one began.
                since = FROM_THE_START
            ended = broker.find_outcomes(ids, since=since) if ids else {}
            ledger_id = ledger_id_of(hook)
        if len(ended) == len(ids):
            return self.execute_complete(context, describe_outcomes(ids, ended))
        self.defer(
            trigger=MessageDispatchedTrigger(
                message_ids=ids,
                delay_conn_id=self.delay_conn_id,
                hold=self.hold,
                since=since,
                cancel_on_kill=self.cancel_on_kill,
                ledger_id=ledger_id,
                give_up_at=None if patience is None else (datetime.now(UTC) + patience).isoformat(),
            ),
            method_name="execute_complete",
            timeout=None if patience is None else patience + _TRIGGER_GRACE,
        )

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Say what is the matter when Airflow itself ended the wait, because no triggerer has."""
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout:
            if self.wait_timeout is None:
                raise
            return self.execute_complete(context, {"timed_out": True, "since": FROM_THE_START})

    def execute_complete(self, context: Context, event: dict[str, Any]) -> str | list[str]:
        """Return the ids when all were dispatched."""
        if event.get("timed_out"):
            event = self._outcomes_in_time(context, since=event["since"])
        require_dispatched(event)
        self.log.info("All %d messages were dispatched", sum(event["counts"].values()))
        with failing_at_once():
            # Computed again: ``defer(kwargs=)`` does not survive ``dag.test()``.
            return self._result([fields["message_id"] for fields in self._each_message(context)])

    def on_kill(self) -> None:
        if self.cancel_on_kill and self._confirmed_ids:
            with closing(DelayHook(self.delay_conn_id, hold=self.hold)) as hook:
                too_late = cancel_in_time(hook.get_conn(), self._confirmed_ids)
            cancelled = len(self._confirmed_ids) - len(too_late)
            self.log.info("The task was ended: cancelled %d messages, %d too late", cancelled, len(too_late))

    def _compose(self, context: Context, *, now: datetime) -> list[Message]:
        origin, messages = origin_of(context), list[Message]()
        for position, fields in enumerate(self._each_message(context)):
            whole = {"channel": None, "payload": None} | fields
            try:
                messages.append(compose_message(**whole, on_past=self.on_past, origin=origin, now=now))
            except InvalidMessageError as error:
                if self.messages is not None:
                    error.args = (f"messages[{position}]: {error}",)
                raise
        return messages

    def _each_message(self, context: Context) -> list[dict[str, Any]]:
        defaults = {name: getattr(self, name) for name in _MESSAGE_FIELDS if getattr(self, name) is not None}
        if self.messages is None:
            items: Sequence[Mapping[str, Any]] = [{}]
        elif "message_id" in defaults:
            raise InvalidMessageError("message_id", "one id is given for many messages", "give each its own, or none")
        else:
            items = self.messages
        origin = origin_of(context)
        return [
            {"message_id": origin.message_id(position)} | _with_defaults(position, item, defaults)
            for position, item in enumerate(items)
        ]

    def _patience(self, messages: Sequence[Message], *, now: datetime) -> timedelta | None:
        if not self.wait_for_dispatch or self.wait_timeout is None:
            return None
        patience = parse_delay("wait_timeout", self.wait_timeout)
        last = max((message.deliver_at for message in messages), default=now)
        if patience <= max(timedelta(0), last - now):
            raise InvalidMessageError(
                "wait_timeout", f"{patience} is over before the last message is due", f"use more than {last - now}"
            )
        return patience

    def _outcomes_in_time(self, context: Context, *, since: str) -> dict[str, Any]:
        """Return how all messages ended, should they have at the last moment; fail otherwise."""
        with failing_at_once(), closing(DelayHook(self.delay_conn_id, hold=self.hold)) as hook:
            ids = [fields["message_id"] for fields in self._each_message(context)]
            ended = hook.get_conn().find_outcomes(ids, since=since)
            if len(ended) < len(ids):
                waiting = [each for each in ids if each not in ended]
                raise WaitTimeoutError(describe_waiting(waiting, hook, of=len(ids), patience=self.wait_timeout))
        return describe_outcomes(ids, ended)

    def _warn_if_not_served(self, hook: DelayHook, receipts: Sequence[Receipt]) -> None:
        if any(receipt.outcome in ("scheduled", "replaced") for receipt in receipts):
            warning = find_dispatcher_warning(hook)
            if warning is not None:
                self.log.warning("The messages are stored and wait, but are not dispatched: %s", warning)

    def _result(self, ids: list[str]) -> str | list[str]:
        return ids[0] if self.messages is None else ids

    def _tell(self, context: Context, messages: Sequence[Message], receipts: Sequence[Receipt]) -> None:
        if not messages:
            self.log.info("No messages were given, so none is scheduled")
            return
        did = Counter(receipt.outcome.value for receipt in receipts)
        due = [message.deliver_at for message in messages]
        self.log.info(
            "Confirmed by %s: scheduled %d, dispatched %d, kept %d, replaced %d; due %s to %s",
            self.delay_conn_id,
            *(did[name] for name in ("scheduled", "dispatched", "kept", "replaced")),
            min(due).isoformat(),
            max(due).isoformat(),
        )
        count_confirmed(zip(messages, receipts, strict=True))
        # Pushed now and not only when the task ends, so that the link is there while the task waits.
        self.message_link = message_url(messages[0].id, self.delay_conn_id)
        context["ti"].xcom_push(key=DelayedMessageLink.xcom_key, value=self.message_link)


class OnTooLate(StrEnum):
    """What to do with a message that waits no longer."""

    FAIL = "fail"
    IGNORE = "ignore"


class CancelMessageOperator(BaseOperator):
    """Make sure that messages are never dispatched. Returns the ids that are cancelled.

    :param message_ids: an id, a list of ids, or the output of the task that scheduled them (templated).
    :param on_too_late: ``fail`` cancels all or none; ``ignore`` cancels those that still wait.
    :param delay_conn_id: the connection of the broker.
    :param hold: who keeps their wait, as when they were scheduled.
    """

    template_fields: Sequence[str] = ("message_ids", "on_too_late", "delay_conn_id", "hold")
    ui_color = "#f7e6df"

    def __init__(
        self,
        *,
        message_ids: str | Sequence[str],
        on_too_late: str = "fail",
        delay_conn_id: str = DEFAULT_CONN_ID,
        hold: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.message_ids = message_ids
        self.on_too_late = on_too_late
        self.delay_conn_id = delay_conn_id
        self.hold = hold

    def execute(self, context: Context) -> list[str]:  # noqa: ARG002 - Airflow's signature
        with failing_at_once(), closing(DelayHook(self.delay_conn_id, hold=self.hold)) as hook:
            ids = parse_message_ids(self.message_ids)
            too_late: list[str] = []
            if parse_choice("on_too_late", OnTooLate, self.on_too_late) is OnTooLate.IGNORE:
                too_late = cancel_in_time(hook.get_conn(), ids)
            else:
                hook.get_conn().cancel(ids)
        cancelled = [each for each in ids if each not in set(too_late)]
        self.log.info("Cancelled %d messages, %d too late", len(cancelled), len(too_late))
        return cancelled


class RescheduleMessageOperator(BaseOperator):
    """Move waiting messages to another time, all or none. Returns their ids.

    :param message_ids: an id, a list of ids, or the output of the task that scheduled them (templated).
    :param deliver_at: the new time, an aware datetime or ISO-8601 text (templated).
    :param deliver_after: or the new delay from now, a timedelta or seconds (templated).
    :param expedite: or make them due now.
    :param on_past: what to do with a time that has passed: ``deliver`` or ``fail``.
    :param delay_conn_id: the connection of the broker.
    :param hold: who keeps their wait, as when they were scheduled.
    """

    template_fields: Sequence[str] = ("message_ids", *_TIME_FIELDS, "on_past", "delay_conn_id", "hold")
    ui_color = "#eef7df"

    def __init__(
        self,
        *,
        message_ids: str | Sequence[str],
        deliver_at: datetime | str | None = None,
        deliver_after: timedelta | float | str | None = None,
        expedite: bool = False,
        on_past: str = "deliver",
        delay_conn_id: str = DEFAULT_CONN_ID,
        hold: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.message_ids = message_ids
        self.deliver_at = deliver_at
        self.deliver_after = deliver_after
        self.expedite = expedite
        self.on_past = on_past
        self.delay_conn_id = delay_conn_id
        self.hold = hold

    def execute(self, context: Context) -> list[str]:  # noqa: ARG002 - Airflow's signature
        with failing_at_once(), closing(DelayHook(self.delay_conn_id, hold=self.hold)) as hook:
            ids = parse_message_ids(self.message_ids)
            given = [name for name in (*_TIME_FIELDS, "expedite") if getattr(self, name) not in (None, False)]
            if len(given) != 1:
                raise InvalidMessageError(
                    "deliver_at",
                    f"{' and '.join(given)} are given" if given else "no new time is given",
                    "give one of deliver_at, deliver_after and expedite=True",
                )
            broker = hook.get_conn()
            if self.expedite:
                broker.expedite(ids)
                self.log.info("Expedited %d messages", len(ids))
                return ids
            due = resolve_deliver_at(
                deliver_at=self.deliver_at,
                deliver_after=self.deliver_after,
                on_past=self.on_past,
                now=broker.clock.now(),
            )
            broker.reschedule(ids, due)
        self.log.info("Rescheduled %d messages to %s", len(ids), due.isoformat())
        return ids


def _with_defaults(position: int, item: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise InvalidMessageError(
            "messages", f"item {position} is {type(item).__name__}", "use dicts such as {'channel': 'invoices'}"
        )
    if unknown := sorted(set(item) - set(_MESSAGE_FIELDS)):
        raise InvalidMessageError(
            "messages", f"item {position} has {', '.join(map(repr, unknown))}", f"use {', '.join(_MESSAGE_FIELDS)}"
        )
    given = {name: value for name, value in item.items() if value is not None or name == "payload"}
    # A time of its own replaces the default time, whichever of the two forms they have.
    if given.keys() & set(_TIME_FIELDS):
        defaults = {name: value for name, value in defaults.items() if name not in _TIME_FIELDS}
    return {**defaults, **given}
