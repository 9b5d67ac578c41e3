"""The columns that the data source ``delay`` writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pyspark.sql.types import (
    BinaryType,
    CharType,
    DataType,
    DayTimeIntervalType,
    MapType,
    NumericType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)
from pyspark.sql.types import IntegralType as WholeNumberType

from airflow_delay_provider.domain.exceptions import ConfigurationError

_TEXT_TYPES = (StringType, VarcharType, CharType)
_TEXT = ("string", _TEXT_TYPES)
#: What Spark calls the types of each column, and the types.
COLUMNS: Mapping[str, tuple[str, tuple[type[DataType], ...]]] = {
    "id": _TEXT,
    "channel": _TEXT,
    "payload": ("string or binary", (*_TEXT_TYPES, BinaryType)),
    "deliver_at": ("timestamp or string (ISO-8601 with a time zone)", (TimestampType, *_TEXT_TYPES)),
    "deliver_after": ("a number (of seconds) or interval day to second", (NumericType, DayTimeIntervalType)),
    "key": _TEXT,
    "headers": ("map<string,string>", (MapType,)),
    "content_type": _TEXT,
    "priority": ("int", (WholeNumberType,)),
}
#: They may also be text, as in CSV files: a number, and headers as a JSON object.
_ALSO_TEXT = frozenset({"deliver_after", "headers", "priority"})
_REMEDIES = {
    "payload": "convert it, for example with to_json(struct(...))",
    "headers": "convert it, for example with map('name', value)",
}


def check_schema(schema: StructType, *, channel: str | None, parses_text: bool = False) -> None:
    """Refuse columns that cannot be messages, before any row is written.

    :param parses_text: whether the writer parses numbers and headers that are text.
    """
    names = Counter(schema.fieldNames())
    for name, count in names.items():
        if name not in COLUMNS:
            raise ConfigurationError(
                f"{name}: is not a column of a message; drop or rename it: the columns are {', '.join(COLUMNS)}"
            )
        if count > 1:
            raise ConfigurationError(f"{name}: {count} columns have this name; drop or rename the others")
    for field in schema.fields:
        if not (parses_text and field.name in _ALSO_TEXT and isinstance(field.dataType, StringType)):
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
            f"{name}: timestamp_ntz has no time zone; cast it to timestamp, with spark.sql.session.timeZone set to"
            " the zone of the times"
        )
    if isinstance(given, types) and not (isinstance(given, MapType) and not _is_text_map(given)):
        return
    raise ConfigurationError(
        f"{name}: {given.simpleString()} is not {wanted}; {_REMEDIES.get(name, 'cast the column')}"
    )


def _is_text_map(given: MapType) -> bool:
    return isinstance(given.keyType, StringType) and isinstance(given.valueType, StringType)
