"""The columns that the data source ``delay`` writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pyspark.sql.types import (
    BinaryType,
    DataType,
    DayTimeIntervalType,
    MapType,
    NumericType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)
from pyspark.sql.types import IntegralType as WholeNumberType

from airflow_delay_provider.domain.exceptions import ConfigurationError

_TEXT = ("string", (StringType,))
#: What Spark calls the types of each column, and the types.
COLUMNS: Mapping[str, tuple[str, tuple[type[DataType], ...]]] = {
    "id": _TEXT,
    "channel": _TEXT,
    "payload": ("string or binary", (StringType, BinaryType)),
    "deliver_at": ("timestamp or string (ISO-8601 with a time zone)", (TimestampType, StringType)),
    "deliver_after": ("a number (of seconds) or interval day to second", (NumericType, DayTimeIntervalType)),
    "key": _TEXT,
    "headers": ("map<string,string>", (MapType,)),
    "content_type": _TEXT,
    "priority": ("int", (WholeNumberType,)),
}
_REMEDIES = {
    "payload": "convert it, for example with to_json(struct(...))",
    "headers": "convert it, for example with map('name', value)",
}


def check_schema(schema: StructType, *, channel: str | None) -> None:
    """Refuse columns that cannot be messages, before any row is written."""
    names = Counter(schema.fieldNames())
    for name, count in names.items():
        if name not in COLUMNS:
            raise ConfigurationError(
                f"{name}: is not a column of a message; drop or rename it: the columns are {', '.join(COLUMNS)}"
            )
        if count > 1:
            raise ConfigurationError(f"{name}: {count} columns have this name; drop or rename the others")
    for field in schema.fields:
        _check_type(field.name, field.dataType)
    if "payload" not in names:
        raise ConfigurationError("payload: the column is missing; add one of type string or binary")
    if not names.keys() & {"deliver_at", "deliver_after"}:
        raise ConfigurationError(
            "deliver_at: the column is missing; add deliver_at (timestamp) or deliver_after (seconds)"
        )
    if "channel" not in names and channel is None:
        raise ConfigurationError(
            'channel: the column is missing; add it, or name one channel for all rows with .option("channel", "NAME")'
        )


def _check_type(name: str, given: DataType) -> None:
    wanted, types = COLUMNS[name]
    if isinstance(given, TimestampNTZType):
        raise ConfigurationError(
            f"{name}: timestamp_ntz has no time zone; convert it with to_utc_timestamp({name}, 'Europe/Berlin') for"
            " times of one zone, or cast it to timestamp, which takes the session's time zone"
        )
    if isinstance(given, types) and not (isinstance(given, MapType) and not _is_text_map(given)):
        return
    raise ConfigurationError(
        f"{name}: {given.simpleString()} is not {wanted}; {_REMEDIES.get(name, 'cast the column')}"
    )


def _is_text_map(given: MapType) -> bool:
    return isinstance(given.keyType, StringType) and isinstance(given.valueType, StringType)
