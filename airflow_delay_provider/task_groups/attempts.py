"""What the tasks of one group tell each other of their attempts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from airflow_delay_provider.spark.history import WORKER_LOST, History, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from airflow.sdk import Context

#: Of the XCom in which an attempt tells its history and that of the attempts before.
HISTORY_KEY = "spark_attempts"
#: A task that a user ends counts as failed before it knows, and tells its end some seconds later.
LAST_WORD_SECONDS = 20.0


def push_history(context: Context, history: History) -> None:
    """Tell the tasks that follow."""
    context["ti"].xcom_push(key=HISTORY_KEY, value=history.as_json())


def pull_history(context: Context, task_id: str) -> History | None:
    """Return what an attempt has told."""
    stored = context["ti"].xcom_pull(task_ids=task_id, key=HISTORY_KEY)
    return History.from_json(stored) if isinstance(stored, dict) else None


def failed_history(context: Context, task_id: str, *, now: datetime) -> History:
    """Return the history up to an attempt that has failed, also when its worker could tell nothing any more."""
    history = _last_word(context, task_id) or History(began_at=now).begin_attempt(now)
    return history.fail_attempt(WORKER_LOST, now) if history.phase is Phase.SUBMITTED else history


def _last_word(context: Context, task_id: str) -> History | None:
    deadline = time.monotonic() + LAST_WORD_SECONDS
    history = pull_history(context, task_id)
    while history is not None and history.phase is Phase.SUBMITTED and time.monotonic() < deadline:
        time.sleep(1)
        history = pull_history(context, task_id)
    return history


def states_of(context: Context, task_ids: Sequence[str]) -> dict[str, str | None]:
    """Return the state of each task in this run, as Airflow knows it."""
    ti: Any = context["ti"]
    map_index = ti.map_index if ti.map_index is not None and ti.map_index >= 0 else None
    told = ti.get_task_states(dag_id=ti.dag_id, task_ids=list(task_ids), run_ids=[ti.run_id], map_index=map_index)
    states = told.get(ti.run_id, {})
    # Airflow adds the index to the names of mapped tasks.
    suffix = "" if map_index is None else f"_{map_index}"
    return {task_id: states.get(f"{task_id}{suffix}") for task_id in task_ids}
