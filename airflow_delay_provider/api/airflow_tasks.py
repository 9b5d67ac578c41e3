"""What Airflow's own database knows about the tasks that scheduled messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from airflow.models.task_state_store import TaskStateStoreModel
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from airflow.utils.state import TaskInstanceState
from sqlalchemy import select, tuple_

from airflow_delay_provider.domain.message import Origin
from airflow_delay_provider.spark.retries import HISTORY_KEY, History


def is_deferred(origin: Origin) -> bool:
    """Whether a task instance is deferred now."""
    query = select(TaskInstance.state).where(
        TaskInstance.dag_id == origin.dag_id,
        TaskInstance.run_id == origin.run_id,
        TaskInstance.task_id == origin.task_id,
        TaskInstance.map_index == origin.map_index,
    )
    with create_session() as session:
        return session.scalar(query) == TaskInstanceState.DEFERRED


def read_histories(origins: Sequence[Origin]) -> dict[Origin, History]:
    """Return the Spark attempts of task instances, from Airflow's task state store, in one query."""
    if not origins:
        return {}
    store = TaskStateStoreModel
    keys = [(each.dag_id, each.run_id, each.task_id, each.map_index) for each in origins]
    query = select(store.dag_id, store.run_id, store.task_id, store.map_index, store.value).where(
        store.key == HISTORY_KEY,
        tuple_(store.dag_id, store.run_id, store.task_id, store.map_index).in_(keys),
    )
    with create_session() as session:
        rows = session.execute(query).all()
    found = {
        Origin(dag_id=row.dag_id, run_id=row.run_id, task_id=row.task_id, map_index=row.map_index): _history(row.value)
        for row in rows
    }
    return {origin: history for origin, history in found.items() if history is not None}


def _history(value: str) -> History | None:
    try:
        stored: Any = json.loads(value)
        # Airflow may store the JSON as a text inside of JSON.
        return History.from_json(json.loads(stored) if isinstance(stored, str) else stored)
    except (ValueError, KeyError, TypeError):
        return None
