"""Shared by operators, sensors and triggers: open the hook, read message ids, decide which errors are retried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from airflow_delay_provider.domain.exceptions import (
    DelayError,
    InvalidMessageError,
    LifecycleError,
    NoRecallError,
    UnknownMessageError,
)
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change
from airflow_delay_provider.domain.message import Origin
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.metrics import AirflowMetrics

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delay_provider.brokers.port import Broker


@contextmanager
def open_hook(conn_id: str, *, hold: str | None = None) -> Iterator[DelayHook]:
    """Open a hook for a task and close it at the end; see :func:`translate_errors`."""
    with translate_errors(), closing(DelayHook(conn_id, hold=hold)) as hook:
        yield hook


@contextmanager
def translate_errors() -> Iterator[None]:
    """Fail the task without retries for errors in the DAG; let Airflow retry all others.

    A broker or database may come back. So may a missing connection, which Airflow also reports if its API is down.
    """
    from airflow.sdk.exceptions import AirflowFailException

    try:
        yield
    except (InvalidMessageError, LifecycleError) as error:
        AirflowMetrics().failed(type(error).__name__)
        # The message is enough; a traceback through our validation would hide it in the task's log.
        raise AirflowFailException(str(error)) from None
    except DelayError as error:
        AirflowMetrics().failed(type(error).__name__)
        raise


def origin_of(context: Context) -> Origin:
    """Return the running task instance as the origin of a message."""
    ti = context["ti"]
    map_index = -1 if ti.map_index is None else ti.map_index
    return Origin(dag_id=ti.dag_id, run_id=ti.run_id, task_id=ti.task_id, map_index=map_index)


def parse_message_ids(value: Any) -> list[str]:
    """Return the distinct ids of one id, a list of ids, or the output of mapped tasks (a list of either)."""
    return list(dict.fromkeys(_each_id(value)))


def _each_id(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        if value.startswith(("[", "(")) or not value:
            raise InvalidMessageError(
                "message_ids",
                f"{value!r} is a list that a template turned into text" if value else "is empty",
                "pass the output of the task itself, or set render_template_as_native_obj=True on the DAG",
            )
        yield value
    elif isinstance(value, Iterable):
        for item in value:
            yield from _each_id(item)
    else:
        raise InvalidMessageError(
            "message_ids", f"{value!r} is not an id", "pass an id, a list of ids or a task's output"
        )


def cancel_in_time(broker: Broker, message_ids: Sequence[str]) -> list[str]:
    """Cancel the messages that are still waiting and return the ids of the others; raise for an unknown id."""
    waiting, too_late = list(message_ids), list[str]()
    while waiting:
        try:
            broker.cancel(waiting)
            break
        except (UnknownMessageError, NoRecallError):
            raise
        except LifecycleError as error:
            # The error names one message. Look up the others at once, to avoid one round for each.
            outcomes = broker.find_outcomes(waiting, since=FROM_THE_START)
            late = {each for each, entry in outcomes.items() if entry.change is not Change.CANCELLED} | {
                error.message_id
            }
            too_late += [each for each in waiting if each in late]
            waiting = [each for each in waiting if each not in late]
    return too_late
