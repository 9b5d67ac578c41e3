"""The ids that a DAG author names, and cancelling those that still wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from airflow_delay_provider.domain.journal import FROM_THE_START
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.exceptions import InvalidMessageError, LifecycleError, NoRecallError, UnknownMessageError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.base import Broker


def parse_message_ids(value: Any) -> list[str]:
    """Return the distinct ids of one id, a list of ids, or the output of mapped tasks (a list of either)."""
    return list(dict.fromkeys(_each_id(value)))


def _each_id(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        if value.startswith(("[", "(")) or not value:
            raise InvalidMessageError(
                "message_ids",
                f"{value!r} is not an id but a list that a template turned into text" if value else "is empty text",
                "pass the output of the task itself, or set render_template_as_native_obj=True on the DAG",
            )
        yield value
    elif isinstance(value, Iterable):
        for item in value:
            yield from _each_id(item)
    else:
        raise InvalidMessageError("message_ids", f"{value!r} is no id", "pass an id, a list of ids or a task's output")


def cancel_in_time(broker: Broker, message_ids: Sequence[str]) -> list[str]:
    """Cancel those that still wait and return the ids for which it is too late; an unknown id is refused."""
    waiting, too_late = list(message_ids), list[str]()
    while waiting:
        try:
            broker.cancel(waiting)
            break
        except (UnknownMessageError, NoRecallError):
            raise
        except LifecycleError as error:
            # The error names one message; the others that are too late are found together, not one a round.
            ended = broker.find_outcomes(waiting, since=FROM_THE_START)
            late = {each for each, entry in ended.items() if entry.change is not Change.CANCELLED} | {error.message_id}
            too_late += [each for each in waiting if each in late]
            waiting = [each for each in waiting if each not in late]
    return too_late
