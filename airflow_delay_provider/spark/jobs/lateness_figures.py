"""Hourly figures of a journal, computed by Spark from the entries of whole days.

Percentiles are exact, with linear interpolation between two values, as ``percentile_cont`` in PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - as everyone writes it

from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.spark.datasource.journal import TimeSource

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

HOUR = ("day", "hour", "connection", "channel")
#: Of the journal, what figures need; ``position`` orders entries of one millisecond.
ENTRY_COLUMNS = (
    "message_id",
    "channel",
    "change",
    "at",
    "time_source",
    "deliver_at",
    "lateness_ms",
    "reason",
    "connection",
    "position",
)
ENTRY_SCHEMA = (
    "message_id string, channel string, change string, at timestamp, time_source string, deliver_at timestamp,"
    " lateness_ms bigint, reason string, connection string, position string, run string, day date"
)
COUNTED = (
    Change.SCHEDULED,
    Change.DISPATCHED,
    Change.CANCELLED,
    Change.DEAD_LETTERED,
    Change.REQUEUED,
    Change.PARKED,
)
PERCENTILES = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
#: How many dispatches have a time that is not exact, by how it is known.
INEXACT = {"to_second": TimeSource.SECOND, "when_read": TimeSource.READ, "untimed": TimeSource.UNKNOWN}
_FAILURES = (Change.DEAD_LETTERED.value, Change.PARKED.value)
_REASON_LENGTH = 200
_REASONS_OF_DAY = 50


def with_day(entries: DataFrame) -> DataFrame:
    """Add the day, in UTC, of each entry."""
    return entries.withColumn("day", F.to_date(_moment()))


def hourly_figures(entries: DataFrame, *, slo_seconds: float, days: Sequence[str]) -> DataFrame:
    """Return one row for each hour and channel of these days.

    :param entries: of these days, and of the day before each, in which duplicates are looked for, too.
    """
    is_dispatch = _is(Change.DISPATCHED)
    own = entries.where(F.col("day").isin(*_dates(days))).withColumn("hour", _hour())
    figures = own.groupBy(*HOUR).agg(
        *(F.count_if(_is(change)).alias(change.value) for change in COUNTED),
        *(F.percentile("lateness_ms", share).alias(name) for name, share in PERCENTILES.items()),
        F.max("lateness_ms").alias("max_ms"),
        F.count_if(is_dispatch & (F.col("lateness_ms") > slo_seconds * 1000)).alias("late"),
        # Other times cannot show whether a message was early.
        F.count_if(is_dispatch & _has_time(TimeSource.RECORDED) & (F.col("at") < F.col("deliver_at"))).alias("early"),
        *(F.count_if(is_dispatch & _has_time(source)).alias(name) for name, source in INEXACT.items()),
    )
    found = figures.join(_duplicates(entries), on=list(HOUR), how="left")
    return found.withColumn("duplicates", F.coalesce("duplicates", F.lit(0)))


def lateness_frequencies(entries: DataFrame) -> DataFrame:
    """Return how often each lateness occurred, by day and channel; percentiles of any period follow from it."""
    dispatched = entries.where(_is(Change.DISPATCHED) & F.col("lateness_ms").isNotNull())
    return dispatched.groupBy("day", "connection", "channel", "lateness_ms").agg(F.count("*").alias("n"))


def failure_reasons(entries: DataFrame) -> DataFrame:
    """Return the most frequent reasons of each day for which messages became dead letters or were parked."""
    failed = entries.where(F.col("change").isin(*_FAILURES)).withColumn(
        "reason", F.substring(F.coalesce("reason", F.lit("")), 1, _REASON_LENGTH)
    )
    counted = failed.groupBy("day", "connection", "channel", "change", "reason").agg(F.count("*").alias("n"))
    rank = F.row_number().over(Window.partitionBy("day").orderBy(F.desc("n"), "connection", "channel", "reason"))
    return counted.withColumn("rank", rank).where(F.col("rank") <= _REASONS_OF_DAY).drop("rank")


def period_lateness(frequencies: DataFrame, by: Sequence[str]) -> DataFrame:
    """Return exact percentiles over a period, by connection, or by connection and channel."""
    return frequencies.groupBy(*by).agg(
        *(F.percentile("lateness_ms", share, F.col("n")).alias(name) for name, share in PERCENTILES.items()),
        F.max("lateness_ms").alias("max_ms"),
    )


def _duplicates(entries: DataFrame) -> DataFrame:
    """Count dispatches of an id beyond the first one and one for each time that it was requeued.

    They are looked for in the day of a dispatch and the day before, however many days are computed at once.

    Most ids are dispatched once, so the others are found by a number of eight bytes, and only those are sorted.
    """
    sent = entries.where(F.col("change").isin(Change.DISPATCHED.value, Change.REQUEUED.value))
    sent = sent.withColumn("hour", _hour()).withColumn("mark", F.xxhash64("connection", "message_id"))
    repeated = sent.where(_is(Change.DISPATCHED)).groupBy("mark").agg(F.count("*").alias("times"))
    suspects = sent.join(repeated.where(F.col("times") > 1).select("mark"), on="mark", how="left_semi")
    seen = suspects.withColumn("counted_day", F.explode(F.array("day", F.date_add("day", 1))))
    of_id = Window.partitionBy("connection", "message_id", "counted_day")
    in_order = Window.partitionBy("connection", "message_id", "counted_day", "change").orderBy(_moment(), "position")
    numbered = seen.select(
        *HOUR,
        "change",
        "counted_day",
        F.row_number().over(in_order).alias("number"),
        F.count_if(_is(Change.REQUEUED)).over(of_id).alias("requeues"),
    )
    extra = numbered.where(_is(Change.DISPATCHED) & (F.col("number") > F.col("requeues") + 1))
    extra = extra.where(F.col("counted_day") == F.col("day"))
    return extra.groupBy(*HOUR).agg(F.count("*").alias("duplicates"))


def _is(change: Change) -> Column:
    return F.col("change") == change.value


def _has_time(source: TimeSource) -> Column:
    return F.col("time_source") == source.value


def _moment() -> Column:
    return F.coalesce("at", "deliver_at")


def _hour() -> Column:
    return F.date_trunc("hour", _moment())


def _dates(days: Sequence[str]) -> list[Column]:
    return [F.lit(day).cast("date") for day in days]
