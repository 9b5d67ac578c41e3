"""The pause that Airflow needs between the deferral of a task and its return."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow.triggers.base import BaseTrigger

#: Time for the scheduler's own loop, after the exit of the deferring process was noticed.
MARGIN_SECONDS = 5.0


async def pause_after_deferral(trigger: BaseTrigger, *, began: float) -> None:
    """Wait until ``trigger`` may resume its task; it ``began`` at this time of the monotonic clock.

    Airflow notices the exit of the deferring process up to ``[workers] min_heartbeat_interval`` seconds late. If the
    task is resumed earlier, the scheduler takes that exit for the resumed task's and fails it (apache/airflow issues
    67287 and 72716). After a longer wait there is no pause, nor in ``dag.test()``, which has no scheduler and no task
    instance.
    """
    if trigger.task_instance is not None:
        await asyncio.sleep(began + _pause_seconds() - time.monotonic())


def _pause_seconds() -> float:
    from airflow.sdk.configuration import conf

    noticed: float = conf.getfloat("workers", "min_heartbeat_interval", fallback=5)
    return noticed + MARGIN_SECONDS
