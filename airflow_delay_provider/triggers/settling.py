"""The pause that Airflow needs between a task's deferral and its return."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow.triggers.base import BaseTrigger

#: For the scheduler's own loop, after the end of the deferring process was noticed.
MARGIN_SECONDS = 5.0


async def let_deferral_settle(trigger: BaseTrigger, *, began: float) -> None:
    """Return once ``trigger``, which ``began`` then on the monotonic clock, may resume its task.

    The end of the process that deferred is noticed up to ``[workers] min_heartbeat_interval`` seconds late. Resumed
    before, the task is failed: the scheduler takes that end for the resumed task's (apache/airflow issues 67287 and
    72716). Longer waits do not pause here, nor does ``dag.test()``, which has no scheduler and gives no task instance.
    """
    if trigger.task_instance is not None:
        await asyncio.sleep(began + _settling_seconds() - time.monotonic())


def _settling_seconds() -> float:
    from airflow.sdk.configuration import conf

    noticed: float = conf.getfloat("workers", "min_heartbeat_interval", fallback=5)
    return noticed + MARGIN_SECONDS
