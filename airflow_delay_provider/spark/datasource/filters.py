"""Filters that Spark pushes down, as conditions on columns, and as SQL of the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)
from sqlalchemy import ColumnElement

from airflow_delay_provider.domain.clock import ceil_ms, floor_ms

_OPERATORS = {GreaterThan: ">", GreaterThanOrEqual: ">=", LessThan: "<", LessThanOrEqual: "<="}
#: How a time, to the microsecond, is compared with a column of whole milliseconds.
_COMPARE: dict[str, Callable[[ColumnElement[int], datetime], ColumnElement[bool]]] = {
    ">": lambda column, moment: column > floor_ms(moment),
    ">=": lambda column, moment: column >= ceil_ms(moment),
    "<": lambda column, moment: column < ceil_ms(moment),
    "<=": lambda column, moment: column <= floor_ms(moment),
}


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition on a column; the rows of a read fulfil all of them."""

    column: str
    #: ``in``, or a comparison.
    operator: str
    values: tuple[Any, ...]

    @property
    def is_of_time(self) -> bool:
        """Whether it compares times."""
        return self.operator != "in"


def parse_filter(pushed: Filter) -> Condition | None:
    """Return the condition of a filter; None for a kind that no source of this package can use."""
    match pushed:
        case EqualTo(attribute=(column,), value=str() as value):
            return Condition(column, "in", (value,))
        case In(attribute=(column,), value=values) if all(isinstance(each, str) for each in values):
            return Condition(column, "in", tuple(values))
        case GreaterThan() | GreaterThanOrEqual() | LessThan() | LessThanOrEqual():
            if len(pushed.attribute) == 1 and _is_moment(pushed.value):
                return Condition(pushed.attribute[0], _OPERATORS[type(pushed)], (pushed.value,))
    return None


def _is_moment(value: object) -> bool:
    return isinstance(value, datetime) and value.tzinfo is not None


def sql_of(
    condition: Condition,
    *,
    texts: Mapping[str, ColumnElement[Any]],
    times: Mapping[str, ColumnElement[int]],
    translate: Callable[[str, str], object] = lambda _, value: value,
) -> ColumnElement[bool] | None:
    """Return a condition as SQL; None if the column cannot be compared in the database.

    :param translate: turns the value of a column into what the database stores; None if it stores no such value.
    """
    name = condition.column
    if condition.is_of_time:
        return _COMPARE[condition.operator](times[name], condition.values[0]) if name in times else None
    if name not in texts:
        return None
    stored = [translate(name, value) for value in condition.values]
    return texts[name].in_([value for value in stored if value is not None])


def accepted(conditions: Iterable[Condition], column: str) -> frozenset[str] | None:
    """Return the values that all conditions accept in a column; None if they accept any."""
    found: frozenset[str] | None = None
    for condition in conditions:
        if condition.column == column and not condition.is_of_time:
            found = frozenset(condition.values) if found is None else found & frozenset(condition.values)
    return found


def earliest(conditions: Iterable[Condition], column: str) -> datetime | None:
    """Return the time before which no row fulfils the conditions; None if there is none."""
    bounds = [each.values[0] for each in conditions if each.column == column and each.operator in (">", ">=")]
    return max(bounds, default=None)


class OptionalPushdown:
    """A method ``pushFilters`` that Spark calls if ``spark.sql.python.filterPushdown.enabled`` is true.

    It is false by default, and Spark then refuses a reader with such a method, which it recognizes by the function
    behind it. Without the setting this reader works, too, and Spark filters the rows itself.
    """

    def __init__(self, push: Callable[[Any, list[Filter]], Iterable[Filter]]) -> None:
        self._push = push

    def __get__(self, reader: Any, _: object = None) -> Any:
        return self if reader is None else _Bound(self._push, reader)


class _Bound:
    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, push: Callable[[Any, list[Filter]], Iterable[Filter]], reader: Any) -> None:
        self._push = push
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        return self._push(self._reader, filters)
