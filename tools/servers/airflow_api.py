"""Airflow's REST API, as far as the demo and the acceptance tests use it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, Self

import httpx

RUN_ENDED = frozenset({"success", "failed"})


class WaitFor(Protocol):
    """Waits for what ``look`` finds; raises when it does not in time."""

    def __call__(self, look: Any, *, what: str, seconds: float, interval: float = 0.5) -> Any: ...


class AirflowApi:
    """One user's session."""

    def __init__(self, url: str, *, user: str | None, password: str | None, wait_for: WaitFor) -> None:
        self._wait_for = wait_for
        self.http = httpx.Client(base_url=url, timeout=60)
        if user is not None:
            answer = self.http.post("/auth/token", json={"username": user, "password": password})
            self.http.headers["Authorization"] = f"Bearer {_json(answer)['access_token']}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()

    def wait_for_dag(self, dag_id: str, *, seconds: float = 120) -> None:
        """Wait until the dag-processor has seen the DAG."""
        self._wait_for(
            lambda: self.http.get(f"/api/v2/dags/{dag_id}").is_success, what=f"DAG {dag_id} is known", seconds=seconds
        )

    def import_errors(self) -> list[dict[str, Any]]:
        errors: list[dict[str, Any]] = self.get("/api/v2/importErrors")["import_errors"]
        return errors

    def trigger(self, dag_id: str, conf: dict[str, Any] | None = None, *, logical_date: str | None = None) -> str:
        """Start a run and return its id; a paused DAG is unpaused."""
        _json(self.http.patch(f"/api/v2/dags/{dag_id}", json={"is_paused": False}))
        body = {"logical_date": logical_date, "conf": conf or {}}
        run_id: str = _json(self.http.post(f"/api/v2/dags/{dag_id}/dagRuns", json=body))["dag_run_id"]
        return run_id

    def wait_for_run(self, dag_id: str, run_id: str, *, seconds: float = 240) -> str:
        """Wait until a run has ended and return its state."""

        def ended() -> str | None:
            state: str = self.get(f"/api/v2/dags/{dag_id}/dagRuns/{run_id}")["state"]
            return state if state in RUN_ENDED else None

        state: str = self._wait_for(ended, what=f"run {run_id} of {dag_id} ends", seconds=seconds, interval=0.5)
        return state

    def wait_for_task(
        self, dag_id: str, run_id: str, task_id: str, states: frozenset[str], *, seconds: float = 120
    ) -> dict[str, Any]:
        """Wait until a task is in one of ``states`` and return it."""

        def reached() -> dict[str, Any] | None:
            task = self.task(dag_id, run_id, task_id)
            return task if task["state"] in states else None

        what = f"task {task_id} of {dag_id} is {' or '.join(sorted(states))}"
        found: dict[str, Any] = self._wait_for(reached, what=what, seconds=seconds)
        return found

    def task(self, dag_id: str, run_id: str, task_id: str) -> dict[str, Any]:
        task: dict[str, Any] = self.get(_task_path(dag_id, run_id, task_id))
        return task

    def tasks(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        path = f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances"
        tasks: list[dict[str, Any]] = self.get(path, limit=100)["task_instances"]
        return tasks

    def xcom(self, dag_id: str, run_id: str, task_id: str, *, map_index: int = -1) -> Any:
        """Return what the task returned, None if it has returned nothing yet."""
        path = f"{_task_path(dag_id, run_id, task_id)}/xcomEntries/return_value"
        answer = self.http.get(path, params={"map_index": map_index, "stringify": False})
        return None if answer.status_code == httpx.codes.NOT_FOUND else _json(answer)["value"]

    def log(self, dag_id: str, run_id: str, task_id: str, *, try_number: int = 1) -> list[dict[str, Any]]:
        """Return the lines of one try."""
        path = f"{_task_path(dag_id, run_id, task_id)}/logs/{try_number}"
        lines: list[dict[str, Any]] = self.get(path, full_content=True)["content"]
        return lines

    def links(self, dag_id: str, run_id: str, task_id: str) -> dict[str, str]:
        """Return the task's extra links by name."""
        links: dict[str, str] = self.get(f"{_task_path(dag_id, run_id, task_id)}/links")["extra_links"]
        return links

    def clear(self, dag_id: str, run_id: str, *task_ids: str) -> None:
        """Run tasks again that have ended."""
        body = {"dry_run": False, "only_failed": False, "dag_run_id": run_id, "task_ids": list(task_ids)}
        _json(self.http.post(f"/api/v2/dags/{dag_id}/clearTaskInstances", json=body))

    def mark(self, dag_id: str, run_id: str, task_id: str, state: str) -> None:
        """End a task as a user does."""
        _json(self.http.patch(_task_path(dag_id, run_id, task_id), json={"new_state": state}))

    def pool(self) -> dict[str, Any]:
        """Return how the slots of workers are used."""
        pool: dict[str, Any] = self.get("/api/v2/pools/default_pool")
        return pool

    def get(self, path: str, **params: Any) -> Any:
        return _json(self.http.get(path, params=params, headers={"Accept": "application/json"}))


def _task_path(dag_id: str, run_id: str, task_id: str) -> str:
    return f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"


def _json(answer: httpx.Response) -> Any:
    if not answer.is_success:
        raise RuntimeError(f"{answer.request.method} {answer.request.url} -> {answer.status_code}: {answer.text}")
    return answer.json()
