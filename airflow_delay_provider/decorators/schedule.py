"""``@task.schedule_message``: a function returns the payload, and the task schedules it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, determine_kwargs, task_decorator_factory
from airflow.sdk.definitions.context import context_merge
from airflow.sdk.exceptions import AirflowFailException

from airflow_delay_provider.operators.schedule import ScheduleMessageOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class ScheduleMessageDecoratedOperator(DecoratedOperator, ScheduleMessageOperator):
    """Schedules a message whose payload a function returns.

    :param python_callable: function that returns the payload.
    :param op_args: its positional arguments (templated).
    :param op_kwargs: its keyword arguments (templated).
    """

    # The payload comes from the function, so text in it that looks like a template is not rendered.
    template_fields: Sequence[str] = (
        *DecoratedOperator.template_fields,
        *(name for name in ScheduleMessageOperator.template_fields if name not in ("payload", "messages")),
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **DecoratedOperator.template_fields_renderers,
        "headers": "json",
    }
    custom_operator_name = "@task.schedule_message"

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        for name in ("payload", "messages"):
            if name in kwargs:
                raise TypeError(
                    f"{name}: @task.schedule_message uses the return value of the function; return the payload instead"
                )
        super().__init__(python_callable=python_callable, op_args=op_args, op_kwargs=op_kwargs, payload=None, **kwargs)

    def execute(self, context: Context) -> Any:
        context_merge(context, self.op_kwargs)
        arguments = determine_kwargs(self.python_callable, self.op_args, context)
        self.payload = self.python_callable(*self.op_args, **arguments)
        if self.payload is None:
            raise AirflowFailException(
                f"payload: {self.python_callable.__name__}() returned nothing, and nothing is scheduled; return the"
                ' payload. To send JSON null, return "null" and set content_type="application/json"'
            )
        return super().execute(context)


def schedule_message_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """Turn a function into a task that schedules its return value as a message.

    :param python_callable: function that returns the payload.
    :param kwargs: arguments of ``ScheduleMessageOperator``, such as ``channel`` and ``deliver_after``.
    """
    return task_decorator_factory(
        python_callable=python_callable,
        # The task returns the message id, whatever type the function returns.
        multiple_outputs=False,
        decorated_operator_class=ScheduleMessageDecoratedOperator,
        **kwargs,
    )
