"""Operators that cancel, reschedule and replay messages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_delay_provider.domain.arguments import parse_choice, parse_moment, resolve_deliver_at
from airflow_delay_provider.domain.exceptions import InvalidMessageError, LifecycleError
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.task import cancel_in_time, open_hook, parse_message_ids

if TYPE_CHECKING:
    from airflow.sdk import Context


class OnTooLate(StrEnum):
    """What to do with a message that is no longer waiting."""

    FAIL = "fail"
    IGNORE = "ignore"


class CancelMessageOperator(BaseOperator):
    """Cancel scheduled messages. Returns the ids of the cancelled ones.

    :param message_ids: an id, a list of ids, or the output of the task that scheduled them (templated).
    :param on_too_late: ``fail`` cancels all messages or none; ``ignore`` cancels those that are still waiting.
    :param delay_conn_id: connection of the broker.
    :param hold: ``broker`` or ``ledger``, the same as when you scheduled the messages.
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
        with open_hook(self.delay_conn_id, hold=self.hold) as hook:
            ids = parse_message_ids(self.message_ids)
            too_late: list[str] = []
            if parse_choice("on_too_late", OnTooLate, self.on_too_late) is OnTooLate.IGNORE:
                too_late = cancel_in_time(hook.get_conn(), ids)
            else:
                hook.get_conn().cancel(ids)
        cancelled = [each for each in ids if each not in set(too_late)]
        self.log.info("Cancelled %d messages, too late for %d", len(cancelled), len(too_late))
        return cancelled


class RescheduleMessageOperator(BaseOperator):
    """Move waiting messages to another due time, all or none. Returns their ids.

    :param message_ids: an id, a list of ids, or the output of the task that scheduled them (templated).
    :param deliver_at: new due time: an aware datetime or ISO-8601 text (templated).
    :param deliver_after: new delay from now: a timedelta or seconds (templated).
    :param expedite: make the messages due now.
    :param on_past: what to do if the new due time has passed: ``deliver`` or ``fail``.
    :param delay_conn_id: connection of the broker.
    :param hold: ``broker`` or ``ledger``, the same as when you scheduled the messages.

    Give exactly one of ``deliver_at``, ``deliver_after`` and ``expedite``.
    """

    template_fields: Sequence[str] = ("message_ids", "deliver_at", "deliver_after", "on_past", "delay_conn_id", "hold")
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
        with open_hook(self.delay_conn_id, hold=self.hold) as hook:
            ids = parse_message_ids(self.message_ids)
            times = ("deliver_at", "deliver_after", "expedite")
            given = [name for name in times if getattr(self, name) not in (None, False)]
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


class OnNotDead(StrEnum):
    """What to do with an id that is no dead letter."""

    FAIL = "fail"
    IGNORE = "ignore"


class ReplayMessageOperator(BaseOperator):
    """Send dead letters to their channels again, due now. Returns the number of messages.

    :param message_ids: an id, a list of ids, or the output of the task that scheduled them.
    :param channel: only messages of this channel. RabbitMQ needs it to find the dead letters.
    :param dead_letter_channel: channel that holds the dead letters; by default the channel's name plus ``.dead``.
    :param dag_id_filter: only messages that this DAG scheduled.
    :param run_id_filter: only messages of this run.
    :param task_id_filter: only messages of this task.
    :param reason: only messages whose reason contains this text.
    :param since: only messages dead-lettered at this time or later: an aware datetime or ISO-8601 text.
    :param until: only messages dead-lettered before this time.
    :param on_not_dead: ``fail`` fails the task after the replay if one of ``message_ids`` is no dead letter;
        ``ignore`` does not.
    :param delay_conn_id: connection of the broker.
    :param hold: ``broker`` or ``ledger``, the same as when you scheduled the messages.

    Give at least one filter; all are templated. The messages keep their ids and are delivered at least once, with a
    handled count of zero.
    """

    template_fields: Sequence[str] = (
        "message_ids",
        "channel",
        "dead_letter_channel",
        "dag_id_filter",
        "run_id_filter",
        "task_id_filter",
        "reason",
        "since",
        "until",
        "on_not_dead",
        "delay_conn_id",
        "hold",
    )
    ui_color = "#e6dff7"

    def __init__(
        self,
        *,
        message_ids: str | Sequence[str] | None = None,
        channel: str | None = None,
        dead_letter_channel: str | None = None,
        dag_id_filter: str | None = None,
        run_id_filter: str | None = None,
        task_id_filter: str | None = None,
        reason: str | None = None,
        since: datetime | str | None = None,
        until: datetime | str | None = None,
        on_not_dead: str = "fail",
        delay_conn_id: str = DEFAULT_CONN_ID,
        hold: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.message_ids = message_ids
        self.channel = channel
        self.dead_letter_channel = dead_letter_channel
        self.dag_id_filter = dag_id_filter
        self.run_id_filter = run_id_filter
        self.task_id_filter = task_id_filter
        self.reason = reason
        self.since = since
        self.until = until
        self.on_not_dead = on_not_dead
        self.delay_conn_id = delay_conn_id
        self.hold = hold

    def execute(self, context: Context) -> int:  # noqa: ARG002 - Airflow's signature
        with open_hook(self.delay_conn_id, hold=self.hold) as hook:
            on_not_dead = parse_choice("on_not_dead", OnNotDead, self.on_not_dead)
            if self.message_ids is not None and not (ids := parse_message_ids(self.message_ids)):
                self.log.info("Nothing to replay: the list of ids is empty")
                return 0
            done = hook.replay(
                ids if self.message_ids is not None else (),
                channel=self.channel,
                dead_letter_channel=self.dead_letter_channel,
                dag_id=self.dag_id_filter,
                run_id=self.run_id_filter,
                task_id=self.task_id_filter,
                reason=self.reason,
                since=None if self.since is None else parse_moment("since", self.since),
                until=None if self.until is None else parse_moment("until", self.until),
            )
            self.log.info("Replayed %d messages; no dead letters: %s", done.count, ", ".join(done.missing) or "none")
            if not done.is_complete:
                self.log.warning(
                    "The channel has more dead letters than one replay reads; run it again, or use a wider filter"
                )
            if done.missing and on_not_dead is OnNotDead.FAIL:
                raise LifecycleError(
                    done.missing[0],
                    f"is no dead letter (one of {len(done.missing)} such ids); see its history with"
                    ' `airflow delay show`, or use on_not_dead="ignore"',
                )
        return done.count
