"""The operator that brings messages back that were given up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_delay_provider.domain.schedule import parse_choice, parse_moment
from airflow_delay_provider.exceptions import LifecycleError
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.hooks.failures import failing_at_once
from airflow_delay_provider.hooks.message_ids import parse_message_ids

if TYPE_CHECKING:
    from airflow.sdk import Context


class OnNotDead(StrEnum):
    """What to do with an id that is not among the messages that were given up."""

    FAIL = "fail"
    IGNORE = "ignore"


class ReplayMessageOperator(BaseOperator):
    """Hand messages that were given up to their channels again, due now. Returns how many.

    They start again with a handled count of none, at least once with the same ids. All fields are templated; what is
    not given does not matter, but something must be.

    :param message_ids: an id, a list of ids, or the output of the task that scheduled them.
    :param channel: only messages of this channel; RabbitMQ needs it to know where to look.
    :param dead_letter_channel: where consumers put them; None is the channel's name with ``.dead`` behind it.
    :param dag_id_filter: only messages that this DAG scheduled.
    :param run_id_filter: only messages of this run.
    :param task_id_filter: only messages of this task.
    :param reason: only messages whose reason contains this text.
    :param since: only what was given up at this moment or later, an aware datetime or ISO-8601 text.
    :param until: only what was given up before this moment.
    :param on_not_dead: ``fail`` fails the task after the replay when a named id was not dead; ``ignore`` does not.
    :param delay_conn_id: the connection of the broker.
    :param hold: who keeps their wait, as when they were scheduled.
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
        with failing_at_once(), closing(DelayHook(self.delay_conn_id, hold=self.hold)) as hook:
            on_not_dead = parse_choice("on_not_dead", OnNotDead, self.on_not_dead)
            if self.message_ids is not None and not (ids := parse_message_ids(self.message_ids)):
                self.log.info("No ids were given, so none is replayed")
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
            self.log.info("Replayed %d messages; not dead: %s", done.count, ", ".join(done.missing) or "none")
            if not done.is_complete:
                self.log.warning("More dead letters lie behind those that were looked at; use a wider filter")
            if done.missing and on_not_dead is OnNotDead.FAIL:
                raise LifecycleError(
                    done.missing[0],
                    f"is not dead, one of {len(done.missing)} such ids; see what became of it with"
                    ' `airflow delay show`, or use on_not_dead="ignore"',
                )
        return done.count
