"""One task of a DAG, run without Airflow's services and without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator, Context
    from airflow.sdk.exceptions import TaskDeferred
    from airflow.triggers.base import BaseTrigger

#: How long a trigger may take to fire.
_PATIENCE_SECONDS = 30


@dataclass(kw_only=True)
class TaskInstanceStub:
    """The part of a task instance that operators and templates use."""

    dag_id: str
    task_id: str
    run_id: str
    map_index: int
    #: The results of other tasks, by task id.
    results: Mapping[str, Any]
    try_number: int = 1
    #: The number of the last try.
    max_tries: int = 0
    #: The XComs of the task, by key.
    pushed: dict[str, Any] = field(default_factory=dict)

    def xcom_push(self, key: str, value: Any) -> None:
        """Keep an XCom of the task."""
        self.pushed[key] = value

    def xcom_pull(self, task_ids: str | None = None, key: str = "return_value", **_options: Any) -> Any:
        """Return the result of another task."""
        return self.results[task_ids] if task_ids is not None and key == "return_value" else self.pushed.get(key)


class TaskRun:
    """Runs a task until it ends and has a ``result``, or until it defers and is ``waiting``.

    :param task: the operator or sensor; its templates are rendered first.
    :param results: the results of the tasks it depends on, by task id.
    :param run_id: the run; the same task in the same run schedules nothing twice.
    :param map_index: which of a mapped task's instances this is.
    :param context: what else templates need, such as ``ds``.
    """

    def __init__(
        self,
        task: BaseOperator,
        *,
        results: Mapping[str, Any] | None = None,
        run_id: str = "test_run",
        map_index: int = -1,
        **context: Any,
    ) -> None:
        dag = task.get_dag()
        self.task = task
        self.ti = TaskInstanceStub(
            dag_id=dag.dag_id if dag else "test_dag",
            task_id=task.task_id,
            run_id=run_id,
            map_index=map_index,
            results=results or {},
            max_tries=task.retries or 0,
        )
        known: Any = {"ti": self.ti, "task_instance": self.ti, "task": task, "run_id": run_id, **context}
        self.context: Context = known
        self.result: Any = None
        self._deferred: TaskDeferred | None = None
        task.render_template_fields(self.context)
        self._go_on(task.execute)

    @property
    def waiting(self) -> bool:
        """Whether the task has deferred and not been resumed."""
        return self._deferred is not None

    def resume(self) -> Any:
        """Let the trigger of a waiting task fire, resume the task with its event, and return the result."""
        if self._deferred is None:
            raise AssertionError(f"task {self.task.task_id!r} does not wait")
        deferred, self._deferred = self._deferred, None
        # A thread of its own, since the test may run on an event loop.
        with ThreadPoolExecutor(1) as pool:
            event = pool.submit(asyncio.run, self._next_event(deferred.trigger)).result()
        self._go_on(getattr(self.task, deferred.method_name), event=event, **(deferred.kwargs or {}))
        return self.result

    def _go_on(self, method: Any, **arguments: Any) -> None:
        from airflow.sdk.exceptions import TaskDeferred

        try:
            self.result = method(self.context, **arguments)
        except TaskDeferred as deferred:
            self._deferred = deferred

    async def _next_event(self, trigger: BaseTrigger) -> Any:
        async with aclosing(trigger.run()) as events:  # type: ignore[type-var]  # always a generator, typed as less
            try:
                return (await asyncio.wait_for(anext(events), _PATIENCE_SECONDS)).payload
            except TimeoutError:
                raise AssertionError(
                    f"task {self.task.task_id!r} still waits; advance the kit to the due time before resume()"
                ) from None
