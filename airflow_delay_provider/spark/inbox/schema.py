"""The columns of a DataFrame that can be scheduled."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import types as t

from airflow_delay_provider.domain.exceptions import ConfigurationError

_TEXT: tuple[type[t.DataType], ...] = (t.StringType, t.CharType, t.VarcharType)
_INTEGERS: tuple[type[t.DataType], ...] = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)
#: The types of each column, and how to say so.
_COLUMNS: Mapping[str, tuple[tuple[type[t.DataType], ...], str]] = {
    "id": (_TEXT, "text"),
    "channel": (_TEXT, "text"),
    "payload": ((*_TEXT, t.BinaryType), "text or binary"),
    "deliver_at": ((t.TimestampType, *_TEXT), "a timestamp, or text in ISO-8601 with a time zone"),
    "deliver_after": ((t.NumericType, t.DayTimeIntervalType), "a number of seconds, or an interval of days to seconds"),
    "key": (_TEXT, "text"),
    "headers": ((t.MapType,), "a map of text to text"),
    "content_type": (_TEXT, "text"),
    "priority": (_INTEGERS, "a whole number"),
}


def require_schema(schema: t.StructType, *, channel: str | None) -> None:
    """Refuse columns that cannot be scheduled, before any row is read."""
    seen = set[str]()
    for column in schema:
        if column.name not in _COLUMNS:
            raise ConfigurationError(
                f"{column.name}: is not a column of a message; drop or rename it: known are {', '.join(_COLUMNS)}"
            )
        if column.name in seen:
            raise ConfigurationError(f"{column.name}: is there twice; drop one")
        seen.add(column.name)
        _require_type(column.name, column.dataType)
    if "payload" not in seen:
        raise ConfigurationError("payload: the column is missing; add it, as text or binary")
    if not seen & {"deliver_at", "deliver_after"}:
        raise ConfigurationError("deliver_at: neither this column nor deliver_after is there; add one of them")
    if "channel" not in seen and channel is None:
        raise ConfigurationError("channel: there is no such column and no default; add the column, or give channel")


def _require_type(name: str, found: t.DataType) -> None:
    types, wanted = _COLUMNS[name]
    if isinstance(found, t.TimestampNTZType):
        raise ConfigurationError(
            f"{name}: {found.simpleString()} has no time zone; make it a timestamp of one, for example with"
            f" to_utc_timestamp({name}, 'Europe/Berlin')"
        )
    is_good = isinstance(found, types)
    if isinstance(found, t.MapType):
        is_good = is_good and isinstance(found.keyType, _TEXT) and isinstance(found.valueType, _TEXT)
    if not is_good:
        raise ConfigurationError(f"{name}: has type {found.simpleString()}; make it {wanted}")
