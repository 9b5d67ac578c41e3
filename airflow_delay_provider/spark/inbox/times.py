"""Due times as columns: whole milliseconds, rounded up, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t

from airflow_delay_provider.brokers.kafka.header_protocol import MAX_MS, MIN_MS
from airflow_delay_provider.domain.arguments import Limits, OnPast

_ONE_MS = timedelta(milliseconds=1)
_ZONE = r"(?:Z|z|[+-]\d{2}(?::?\d{2})?)"
_MOMENT = r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}"
_ISO_8601 = rf"\A\s*{_MOMENT}(?::\d{{2}}(?:[.,]\d{{1,9}})?)?{_ZONE}\s*\z"
_WITHOUT_ZONE = rf"\A\s*{_MOMENT}(?::\d{{2}}(?:[.,]\d{{1,9}})?)?\s*\z"


def due_ms(df: DataFrame) -> Column:
    """Return ``deliver_at`` in milliseconds since 1970; null if it is null or not a time."""
    if "deliver_at" not in df.columns:
        return f.lit(None).cast("bigint")
    moment = f.col("deliver_at")
    if not isinstance(df.schema["deliver_at"].dataType, t.TimestampType):
        # Spark wants seconds, and a point before their fraction.
        text = f.regexp_replace(f.upper(f.trim(moment)), rf"^(.{{16}})(?={_ZONE})", "$1:00")
        moment = f.when(moment.rlike(_ISO_8601), f.replace(text, f.lit(","), f.lit("."))).try_cast("timestamp")
    return _ceil_ms(f.unix_micros(moment))


def after_ms(df: DataFrame) -> Column:
    """Return ``deliver_after`` in milliseconds; null if it is null, not a number or too large for one."""
    if "deliver_after" not in df.columns:
        return f.lit(None).cast("bigint")
    seconds = f.col("deliver_after")
    if isinstance(df.schema["deliver_after"].dataType, t.DayTimeIntervalType):
        seconds = seconds_of(seconds)
    # As a decimal, microseconds are exact; NaN and infinity become null.
    return _ceil_ms((f.round(seconds.try_cast("decimal(24,9)"), 6) * 1_000_000).try_cast("bigint"))


def seconds_of(interval: Column) -> Column:
    """Return the length of an interval of days to seconds."""
    return interval.cast("interval day to second").cast("decimal(24,6)")


def _ceil_ms(micros: Column) -> Column:
    rest = f.pmod(micros, f.lit(1000))
    return f.call_function("div", micros - rest, f.lit(1000)) + f.when(rest > 0, 1).otherwise(0)


def faults(
    types: Mapping[str, t.DataType], due: Column, after: Column, *, limits: Limits, on_past: OnPast, now_ms: int
) -> Iterator[tuple[Column, Column]]:
    """Yield each condition that rejects a due time, with the reason."""
    at = f.col("deliver_at") if "deliver_at" in types else f.lit(None)
    wait = f.col("deliver_after") if "deliver_after" in types else f.lit(None)
    yield (
        at.isNull() & wait.isNull(),
        f.lit("deliver_at: is null, and so is deliver_after; give one of them"),
    )
    yield at.isNotNull() & wait.isNotNull(), f.lit("deliver_at: deliver_after is given, too; give only one of them")
    if "deliver_at" in types:
        yield from _faults_of_text(at, due)
        yield ~due.between(MIN_MS, MAX_MS), f.lit("deliver_at: is out of range; use a year from 1 to 9999")
    if "deliver_after" in types:
        yield wait.isNotNull() & after.isNull(), f.lit("deliver_after: is not a delay; use a number of seconds")
    delay = f.coalesce(due - now_ms, after)
    name = f.when(due.isNotNull(), "deliver_at").otherwise("deliver_after")
    if on_past is OnPast.FAIL:
        yield delay < 0, f.concat(name, f.lit(': has passed; choose a later time, or use on_past="deliver"'))
    if limits.min_delay > timedelta(0):
        yield (
            delay < -(-limits.min_delay // _ONE_MS),
            f.concat(
                name,
                f.lit(
                    f": is less than min_delay ({limits.min_delay}) from now; choose a later time, or"
                    " lower min_delay in the connection"
                ),
            ),
        )
    yield (
        delay > limits.max_delay // _ONE_MS,
        f.concat(
            name,
            f.lit(
                f": is more than max_delay ({limits.max_delay}) from now; choose an earlier time, or"
                " raise max_delay in the connection"
            ),
        ),
    )


def _faults_of_text(at: Column, due: Column) -> Iterator[tuple[Column, Column]]:
    # Of a timestamp, neither can be.
    text = at.cast("string")
    yield (
        due.isNull() & text.rlike(_WITHOUT_ZONE),
        f.concat(f.lit("deliver_at: '"), text, f.lit("' has no time zone; add one, for example +00:00")),
    )
    yield (
        at.isNotNull() & due.isNull(),
        f.concat(
            f.lit("deliver_at: '"),
            f.left(text, f.lit(100)),
            f.lit("' is not a time; use ISO-8601 such as 2030-01-31T17:00:00Z"),
        ),
    )
