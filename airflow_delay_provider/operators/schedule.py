"""The operator that schedules messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import TaskDeferralTimeout

from airflow_delay_provider.domain.arguments import OnConflict, compose_message, parse_choice, parse_delay, parse_moment
from airflow_delay_provider.domain.exceptions import InvalidMessageError, WaitTimeoutError
from airflow_delay_provider.domain.lifecycle import FROM_THE_START
from airflow_delay_provider.domain.message import Message, require_aware
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.delay import DelayHook, find_dispatcher_warning, ledger_id_of
from airflow_delay_provider.hooks.task import (
    ConfirmedStore,
    cancel_in_time,
    open_hook,
    origin_of,
    schedule_once,
    translate_errors,
)
from airflow_delay_provider.links import DelayedMessageLink, message_url, messages_url
from airflow_delay_provider.triggers.message import MessageDispatchedTrigger, describe_outcomes, require_dispatched

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delay_provider.brokers.port import Receipt

_TIME_FIELDS = ("deliver_at", "deliver_after")
_MESSAGE_FIELDS = ("channel", "payload", *_TIME_FIELDS, "message_id", "key", "headers", "content_type", "priority")
_SETTINGS = ("delay_conn_id", "hold", "on_conflict", "on_past", "wait_timeout")
#: Airflow's time-out comes this much after the trigger's own, for the case that no triggerer runs.
_TRIGGER_GRACE = timedelta(minutes=1)
#: Ids in an error message or a line of the log.
SHOWN_IDS = 5
#: Tells a payload of None, which is sent as ``null``, from one that was forgotten.
_FORGOTTEN: Any = object()


class ScheduleMessageOperator(BaseOperator):
    """Schedule one or more messages, and optionally wait until they are dispatched.

    :param channel: queue, topic or embedded channel that receives the message. All message fields are templated.
    :param payload: bytes, text, or any data that can be written as JSON; None is sent as ``null``.
    :param deliver_at: due time: an aware datetime or ISO-8601 text such as ``"{{ data_interval_end }}"``.
    :param deliver_after: delay from now: a timedelta or seconds. Without a due time or delay, the message is sent now.
    :param message_id: id of the message; by default it is derived from DAG, run, task, map index and position.
    :param key: messages with the same channel and key are delivered in the order of their due times.
    :param headers: names and values, both text.
    :param content_type: overrides the content type that follows from the payload.
    :param priority: 0 to 255.
    :param messages: schedules many messages: dicts of the fields above. Fields that you also pass to the operator are
        the defaults of each message.
    :param delay_conn_id: connection of the broker.
    :param hold: ``broker`` or ``ledger``: what stores the message until it is due. With ``ledger`` you can cancel and
        reschedule messages on every broker. By default the connection decides.
    :param on_conflict: what to do if the id is taken: ``keep``, ``fail`` or ``replace``.
    :param on_past: what to do if the due time has passed: ``deliver`` or ``fail``.
    :param wait_for_dispatch: succeed only after all messages are dispatched, without using a worker slot meanwhile. A
        cancelled or dead-lettered message fails the task.
    :param wait_timeout: fail the task if ``wait_for_dispatch`` takes longer than this timedelta or number of seconds.
        The messages stay scheduled, and a retried or cleared task waits for them again. By default there is no limit.
    :param cancel_on_kill: cancel the waiting messages if a user stops the task. Airflow stops a deferred task this way
        only after a triggerer has picked it up, about a second after the deferral.

    Returns the id, or a list of ids with ``messages``. A retried or cleared task schedules nothing twice, because the
    ids stay the same. If scheduling fails, the ledger stores no message at all. A broker that holds messages itself may
    store some of them; the retry then publishes only the others.
    """

    template_fields: Sequence[str] = (*_MESSAGE_FIELDS, "messages", *_SETTINGS)
    template_fields_renderers: ClassVar[dict[str, str]] = {"payload": "json", "headers": "json", "messages": "json"}
    operator_extra_links = (DelayedMessageLink(),)
    ui_color = "#dfeaf7"

    def __init__(
        self,
        *,
        channel: str | None = None,
        payload: Any = _FORGOTTEN,
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
        self.payload = None if payload is _FORGOTTEN else payload
        self._has_payload = payload is not _FORGOTTEN
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
        #: URL of the link; None until this process has tried to schedule.
        self.message_link: str | None = None
        self._confirmed_ids: list[str] = []
        self._refuse_mistakes()

    def _refuse_mistakes(self) -> None:
        """Refuse what no template can make right, so that the DAG does not even import."""
        if self.messages is None:
            if self.channel is None:
                raise InvalidMessageError("channel", "missing", 'give one, such as channel="invoices"')
            if not self._has_payload:
                raise _without_payload()
        if _is_constant(self.deliver_at) and _is_constant(self.deliver_after):
            raise InvalidMessageError("deliver_at", "deliver_after is given, too", "give only one of them")
        if self.deliver_at is not None and _is_constant(self.deliver_at):
            require_aware("deliver_at", parse_moment("deliver_at", self.deliver_at))
        if self.deliver_after is not None and _is_constant(self.deliver_after):
            parse_delay("deliver_after", self.deliver_after)

    def execute(self, context: Context) -> str | list[str]:
        self.message_link = ""
        with open_hook(self.delay_conn_id, hold=self.hold) as hook:
            broker = hook.get_conn()
            if self.cancel_on_kill and not broker.can_recall:
                raise InvalidMessageError(
                    "cancel_on_kill", "this broker holds messages itself and cannot cancel them", 'add hold="ledger"'
                )
            began = broker.clock.now()
            messages = self._compose(context, now=began)
            patience = self._patience(messages, now=began)
            ids = [message.id for message in messages]
            policy = parse_choice("on_conflict", OnConflict, self.on_conflict)
            confirmed = ConfirmedStore(None if broker.knows_ids else context.get("task_state_store"), ids)
            if confirmed.since is None:
                # Read before scheduling, so that every outcome is recorded after this position.
                confirmed.since = broker.journal_end() if self.wait_for_dispatch else FROM_THE_START
            since = confirmed.since
            receipts = schedule_once(broker, messages, on_conflict=policy, confirmed=confirmed) if messages else []
            self._confirmed_ids = ids
            self._log_summary(context, messages, receipts)
            if not broker.knows_ids:
                self._warn_of_skipped(receipts)
            self._warn_without_dispatcher(hook, receipts)
            if not self.wait_for_dispatch:
                return self._result(ids)
            if broker.knows_ids and any(receipt.outcome == "kept" for receipt in receipts):
                # An earlier try scheduled them, so their outcomes may be older than this try.
                since = FROM_THE_START
            outcomes = broker.find_outcomes(ids, since=since) if ids else {}
            ledger_id = ledger_id_of(hook)
        if len(outcomes) == len(ids):
            return self.execute_complete(context, describe_outcomes(ids, outcomes))
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
        """Explain the failure if Airflow itself timed the task out because no triggerer did."""
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout:
            if self.wait_timeout is None:
                raise
            return self.execute_complete(context, {"timed_out": True, "since": FROM_THE_START})

    def execute_complete(self, context: Context, event: dict[str, Any]) -> str | list[str]:
        """Return the ids if all messages were dispatched, and fail otherwise."""
        if event.get("timed_out"):
            event = self._find_late_outcomes(context, since=event["since"])
        require_dispatched(event)
        self.log.info("All %d messages were dispatched", sum(event["counts"].values()))
        with translate_errors():
            # Computed again: ``defer(kwargs=)`` does not survive ``dag.test()``.
            return self._result([fields["message_id"] for fields in self._each_message(context)])

    def on_kill(self) -> None:
        if self.cancel_on_kill and self._confirmed_ids:
            with closing(DelayHook(self.delay_conn_id, hold=self.hold)) as hook:
                too_late = cancel_in_time(hook.get_conn(), self._confirmed_ids)
            cancelled = len(self._confirmed_ids) - len(too_late)
            self.log.info("The task was stopped: cancelled %d messages, too late for %d", cancelled, len(too_late))

    def _compose(self, context: Context, *, now: datetime) -> list[Message]:
        origin, messages = origin_of(context), list[Message]()
        for position, fields in enumerate(self._each_message(context)):
            required = {"channel": None, "payload": None}
            try:
                if not self._has_payload and "payload" not in fields:
                    raise _without_payload()
                messages.append(compose_message(**required | fields, on_past=self.on_past, origin=origin, now=now))
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
            raise InvalidMessageError(
                "message_id", "one id cannot name many messages", "give each message its own id, or none"
            )
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
                "wait_timeout", f"{patience} ends before the last message is due", f"use more than {last - now}"
            )
        return patience

    def _find_late_outcomes(self, context: Context, *, since: str) -> dict[str, Any]:
        """Return the outcomes if all messages got one at the last moment, and fail otherwise."""
        with open_hook(self.delay_conn_id, hold=self.hold) as hook:
            ids = [fields["message_id"] for fields in self._each_message(context)]
            outcomes = hook.get_conn().find_outcomes(ids, since=since)
            if len(outcomes) < len(ids):
                waiting = [each for each in ids if each not in outcomes]
                raise WaitTimeoutError(_describe_waiting(waiting, hook, of=len(ids), patience=self.wait_timeout))
        return describe_outcomes(ids, outcomes)

    def _warn_of_skipped(self, receipts: Sequence[Receipt]) -> None:
        """Name the way back of dead messages: a cleared task does not schedule them again on this broker."""
        if skipped := sum(receipt.outcome == "kept" for receipt in receipts):
            self.log.warning(
                "Skipped %d messages that an earlier run of this task has scheduled. If they are dead letters now,"
                " send them again with `airflow delay replay --conn-id %s`",
                skipped,
                self.delay_conn_id,
            )

    def _warn_without_dispatcher(self, hook: DelayHook, receipts: Sequence[Receipt]) -> None:
        if any(receipt.outcome in ("scheduled", "replaced") for receipt in receipts):
            warning = find_dispatcher_warning(hook)
            if warning is not None:
                self.log.warning("The messages are scheduled, but nothing dispatches them: %s", warning)

    def _result(self, ids: list[str]) -> str | list[str]:
        return ids[0] if self.messages is None else ids

    def _log_summary(self, context: Context, messages: Sequence[Message], receipts: Sequence[Receipt]) -> None:
        if not messages:
            self.log.info("Nothing to schedule: the list of messages is empty")
            return
        counts = Counter(receipt.outcome.value for receipt in receipts)
        due = [message.deliver_at for message in messages]
        self.log.info(
            "Confirmed by %s: scheduled %d, dispatched %d, kept %d, replaced %d; due %s to %s; channel %s; id %s",
            self.delay_conn_id,
            *(counts[name] for name in ("scheduled", "dispatched", "kept", "replaced")),
            min(due).isoformat(),
            max(due).isoformat(),
            _shown(sorted({message.channel for message in messages})),
            _shown([message.id for message in messages]),
        )
        # Pushed now, and not only at the end of the task, so that the link works while the task waits.
        self.message_link = (
            message_url(messages[0].id, self.delay_conn_id)
            if len(messages) == 1
            else messages_url(origin_of(context), self.delay_conn_id)
        )
        context["ti"].xcom_push(key=DelayedMessageLink.xcom_key, value=self.message_link)


def _is_constant(value: object) -> bool:
    """Tell whether a time is given that no template changes."""
    return isinstance(value, datetime | timedelta | int | float) or (isinstance(value, str) and "{" not in value)


def _without_payload() -> InvalidMessageError:
    return InvalidMessageError("payload", "missing", "give one; payload=None sends null")


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN_IDS]) + (f" and {len(names) - SHOWN_IDS} more" if len(names) > SHOWN_IDS else "")


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
    # The item's own time replaces the default, even if one is a due time and the other a delay.
    if given.keys() & set(_TIME_FIELDS):
        defaults = {name: value for name, value in defaults.items() if name not in _TIME_FIELDS}
    return {**defaults, **given}


def _describe_waiting(waiting: Sequence[str], hook: DelayHook, *, of: int, patience: object) -> str:
    """Say which messages a task has waited for too long, and what to do."""
    connection = "" if hook.delay_conn_id == DEFAULT_CONN_ID else f" --conn-id {hook.delay_conn_id}"
    warning = find_dispatcher_warning(hook)
    advice = f": {warning}" if warning else f"; see `airflow delay show {waiting[0]}{connection}`"
    unit = "" if isinstance(patience, timedelta) else " s"
    return (
        f"wait_timeout: {len(waiting)} of {of} messages were not dispatched within {patience}{unit}"
        f" ({_shown(waiting)}); they stay scheduled, and a retry of this task waits for them again{advice}"
    )
