"""Name, compute and complete the columns of a message."""

from __future__ import annotations

from argparse import Namespace

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql.functions import coalesce, col, expr, lit, when
from pyspark.sql.types import DataType, IntegralType, StringType

from airflow_delay_provider.spark.jobs.command import UsageError, condition_of

COLUMNS = (
    "id",
    "channel",
    "payload",
    "deliver_at",
    "deliver_after",
    "key",
    "headers",
    "content_type",
    "priority",
)
#: Whole numbers are welcome here.
_TEXTS = frozenset({"id", "channel", "key", "content_type"})


def shape_columns(rows: DataFrame, arguments: Namespace) -> DataFrame:
    """Return the rows with the columns of a message and no others."""
    _check_names(rows, arguments)
    taken = {**{name: _named(source) for name, source in arguments.columns.items()}}
    taken |= {name: expr(sql) for name, sql in arguments.expressions.items()}
    sources = set(arguments.columns.values())
    for name in COLUMNS:
        if name in rows.columns and name not in sources:
            taken.setdefault(name, _named(name))
    try:
        shaped = rows.select(*(taken[name].alias(name) for name in COLUMNS if name in taken))
    except PySparkException as error:
        raise UsageError("--expression", _reason_of(error), "correct it") from None
    return _complete(_with_texts(shaped), arguments)


def _check_names(rows: DataFrame, arguments: Namespace) -> None:
    for option, given in (("--column", arguments.columns), ("--expression", arguments.expressions)):
        for name in given:
            if name not in COLUMNS:
                raise UsageError(option, f"{name} is no column of a message", f"use one of {', '.join(COLUMNS)}")
    for source in arguments.columns.values():
        if source not in rows.columns:
            raise UsageError("--column", f"the input has no column {source!r}", f"use one of {', '.join(rows.columns)}")
    if arguments.ignore_other_columns or arguments.expressions:
        return
    others = [name for name in rows.columns if name not in COLUMNS and name not in arguments.columns.values()]
    if others:
        raise UsageError(
            "--column",
            f"{', '.join(others)}: no part of a message",
            "name them, as in --column payload=NAME, or give --ignore-other-columns",
        )


def _with_texts(rows: DataFrame) -> DataFrame:
    casts = {
        field.name: col(field.name).cast(StringType())
        for field in rows.schema.fields
        if field.name in _TEXTS and isinstance(field.dataType, IntegralType)
    }
    return rows.withColumns(casts) if casts else rows


def _complete(rows: DataFrame, arguments: Namespace) -> DataFrame:
    """Fill in the values for rows that do not give their own."""
    for name in ("content_type", "priority"):
        value = getattr(arguments, name)
        if value is not None:
            rows = rows.withColumn(name, _default(rows, name, lit(value)))
    for name in ("deliver_at", "deliver_after"):
        value = getattr(arguments, name)
        if value is not None:
            times = [col(each).isNull() for each in ("deliver_at", "deliver_after") if each in rows.columns]
            has_none = lit(True)
            for is_null in times:
                has_none = has_none & is_null
            literal = lit(value).cast(_type_of(rows, name)) if name in rows.columns else lit(value)
            own = col(name) if name in rows.columns else lit(None)
            rows = rows.withColumn(name, when(has_none, literal).otherwise(own))
    return rows


def _default(rows: DataFrame, name: str, value: Column) -> Column:
    if name not in rows.columns:
        return value
    return coalesce(col(name), value.cast(_type_of(rows, name)))


def _type_of(rows: DataFrame, name: str) -> DataType:
    return rows.schema[name].dataType


def _named(column: str) -> Column:
    return col("`" + column.replace("`", "``") + "`")


def _reason_of(error: PySparkException) -> str:
    """Return the first sentence of Spark's explanation."""
    text = (error.getMessage() or str(error)).partition("\n")[0]
    condition = condition_of(error)
    return text.removeprefix(f"[{condition}] ").removeprefix(f"[{condition}] ").partition(". ")[0].rstrip(".")
