"""One DAG run, as the acceptance tests look at it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.servers.airflow_api import AirflowApi

DEFERRED = frozenset({"deferred"})
SUCCESS = frozenset({"success"})


@dataclass(frozen=True)
class Run:
    """One DAG run."""

    api: AirflowApi
    dag_id: str
    run_id: str

    def wait(self, state: str = "success") -> None:
        assert self.api.wait_for_run(self.dag_id, self.run_id) == state, self.states()

    def wait_for_task(self, task_id: str, states: frozenset[str]) -> dict[str, Any]:
        return self.api.wait_for_task(self.dag_id, self.run_id, task_id, states)

    def is_with_triggerer(self, task_id: str) -> bool:
        """Whether the trigger of a deferred task runs; only a running one is notified when a user ends the task."""
        return "(ID" in self.log(task_id)

    def states(self) -> dict[str, str]:
        return {task["task_id"]: task["state"] for task in self.api.tasks(self.dag_id, self.run_id)}

    def task(self, task_id: str) -> dict[str, Any]:
        return self.api.task(self.dag_id, self.run_id, task_id)

    def result(self, task_id: str, *, map_index: int = -1) -> Any:
        return self.api.xcom(self.dag_id, self.run_id, task_id, map_index=map_index)

    def log(self, task_id: str) -> str:
        return "\n".join(json.dumps(line) for line in self.api.log(self.dag_id, self.run_id, task_id))


Start = Callable[..., Run]
