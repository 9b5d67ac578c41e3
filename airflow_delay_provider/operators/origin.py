"""Who schedules a message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_delay_provider.domain.message import Origin

if TYPE_CHECKING:
    from airflow.sdk import Context


def origin_of(context: Context) -> Origin:
    """Return the task instance that runs."""
    ti = context["ti"]
    map_index = -1 if ti.map_index is None else ti.map_index
    return Origin(dag_id=ti.dag_id, run_id=ti.run_id, task_id=ti.task_id, map_index=map_index)
