"""What the lateness report says: figures of a period, gathered by Spark and small enough for the driver."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - as everyone writes it

from airflow_delay_provider.spark.jobs.lateness_figures import INEXACT, PERCENTILES, period_lateness
from airflow_delay_provider.spark.jobs.lateness_folder import (
    FREQUENCIES,
    HOURLY,
    REASONS,
    FolderState,
    Gap,
    ReportFolder,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

#: Rows of the tables, and lines of a plot.
MOST_CHANNELS = 100
MOST_LINES = 6
MOST_ANOMALIES = 20
MOST_REASONS = 20
#: An hour is unusual if its p99 is this many times the channel's median p99, and at least a second above it.
ANOMALY_FACTOR = 3.0
ANOMALY_MS = 1000
_ANOMALY_HOURS, _ANOMALY_DISPATCHES = 4, 20
_SUMMED = (
    "scheduled",
    "dispatched",
    "cancelled",
    "dead_lettered",
    "requeued",
    "parked",
    "late",
    "early",
    *INEXACT,
    "duplicates",
)
#: Shares at which the distribution is drawn: fine where it matters.
CURVE = tuple(sorted({*(step / 100 for step in range(101)), 0.995, 0.999, 0.9995, 0.9999}))


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What the report shows."""

    slo_seconds: float = 5.0
    slo_target: float = 0.99
    days: int = 14


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of a connection, or of a channel, over the period."""

    connection: str
    channel: str = ""
    counts: Mapping[str, int]
    #: Milliseconds by name; None without a dispatch.
    lateness: Mapping[str, float | None]

    @property
    def in_time(self) -> float | None:
        """The share of dispatches, of those whose time is known, that were not late."""
        timed = self.counts["dispatched"] - self.counts["untimed"]
        return 1 - self.counts["late"] / timed if timed else None

    def burn(self, target: float) -> float | None:
        """How much of the error budget was used; 1.0 is all of it."""
        return None if self.in_time is None else (1 - self.in_time) / (1 - target)

    @property
    def can_show_early(self) -> bool:
        """Whether at least one dispatch has a time that could show that it was early."""
        return self.counts["dispatched"] > sum(self.counts[name] for name in INEXACT)


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that the page shows."""

    options: ReportOptions
    first: date | None
    last: date | None
    made_at: datetime
    connections: Sequence[Summary] = ()
    channels: Sequence[Summary] = ()
    more_channels: int = 0
    #: Rows of the busiest channels: hour, connection, channel, p50_ms, p99_ms, dispatched.
    hours: Sequence[Mapping[str, Any]] = ()
    #: Counts and late dispatches by hour and connection.
    traffic: Sequence[Mapping[str, Any]] = ()
    #: The lateness in milliseconds at each share of CURVE, by connection.
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    anomalies: Sequence[Mapping[str, Any]] = ()
    reasons: Sequence[Mapping[str, Any]] = ()
    gaps: Sequence[Gap] = ()
    #: Days after today that have entries: the clock of a client was wrong.
    later_days: Sequence[str] = ()

    def missed(self, connections: Collection[str]) -> list[Summary]:
        """Return those of these connections that dispatched too few messages in time."""
        judged = [each for each in self.connections if each.connection in connections]
        return [each for each in judged if each.in_time is not None and each.in_time < self.options.slo_target]


def write_report(
    spark: SparkSession,
    folder: ReportFolder,
    state: FolderState,
    options: ReportOptions,
    *,
    say: Callable[[str], None],
) -> Report:
    """Write ``report.html``, ``report.md`` and their plots, and return what they say."""
    from airflow_delay_provider.spark.jobs.lateness_page import render_html, render_markdown
    from airflow_delay_provider.spark.jobs.lateness_plots import draw_plots

    report = gather(spark, folder, state, options)
    plots = draw_plots(report)
    for name, picture in plots.items():
        folder.write(f"plots/{name}.svg", picture)
    folder.write("report.md", render_markdown(report, list(plots)).encode())
    folder.write("report.html", render_html(report, plots).encode())
    for each in report.connections:
        say(_line(each, options))
    return report


def gather(spark: SparkSession, folder: ReportFolder, state: FolderState, options: ReportOptions) -> Report:
    """Compute the report from the figures of the last days."""
    made_at = datetime.now(UTC)
    days = [day for day in state.days if day <= str(made_at.date())]
    later_days = state.days[len(days) :]
    if not days:
        return Report(options=options, first=None, last=None, made_at=made_at, gaps=state.gaps, later_days=later_days)
    last = date.fromisoformat(days[-1])
    first = max(date.fromisoformat(days[0]), last - timedelta(days=options.days - 1))
    counted = {day: state.figures[day] for day in days if day >= str(first)}
    # Hours are in UTC; Python would get a timestamp in the zone of the driver.
    hourly = _figures(spark, folder, HOURLY, counted).withColumn("hour", F.col("hour").cast("timestamp_ntz")).cache()
    frequencies = _figures(spark, folder, FREQUENCIES, counted)
    try:
        channels = _summaries(hourly, frequencies, by=["connection", "channel"], most=MOST_CHANNELS)
        busiest = [(each.connection, each.channel) for each in channels]
        return Report(
            options=options,
            first=first,
            last=last,
            made_at=made_at,
            connections=_summaries(hourly, frequencies, by=["connection"], most=MOST_CHANNELS),
            channels=channels,
            more_channels=hourly.select("connection", "channel").distinct().count() - len(channels),
            hours=_hours(spark, hourly, busiest),
            traffic=_traffic(hourly),
            curves=_curves(frequencies),
            anomalies=_anomalies(hourly),
            reasons=_reasons(_figures(spark, folder, REASONS, counted)),
            gaps=[gap for gap in state.gaps if gap.until >= str(first)],
            later_days=later_days,
        )
    finally:
        hourly.unpersist()


def _figures(spark: SparkSession, folder: ReportFolder, table: str, counted: Mapping[str, str]) -> DataFrame:
    """Return the figures of days, each of the run that counts for it."""
    schema = {
        HOURLY: "hour timestamp, connection string, channel string, p50_ms double, p95_ms double, p99_ms double,"
        f" max_ms bigint, {', '.join(f'{name} bigint' for name in _SUMMED)}",
        FREQUENCIES: "connection string, channel string, lateness_ms bigint, n bigint",
        REASONS: "connection string, channel string, change string, reason string, n bigint",
    }[table]
    reader = spark.read.schema(f"{schema}, run string, day date").option("basePath", folder.at(table))
    found = reader.parquet(*folder.figures_of(table, counted.values()))
    run_of_day = F.concat_ws(" ", F.col("day").cast("string"), "run")
    return found.where(run_of_day.isin([f"{day} {run}" for day, run in counted.items()]))


def _summaries(hourly: DataFrame, frequencies: DataFrame, *, by: list[str], most: int) -> list[Summary]:
    sums = hourly.groupBy(*by).agg(*(F.sum(name).alias(name) for name in _SUMMED))
    busiest = sums.orderBy(F.desc("dispatched"), F.desc("scheduled"), *by).limit(most)
    found = busiest.join(period_lateness(frequencies, by), on=by, how="left").collect()
    summaries = [
        Summary(
            connection=row["connection"],
            channel=row["channel"] if "channel" in by else "",
            counts={name: int(row[name]) for name in _SUMMED},
            lateness={name: row[name] for name in (*PERCENTILES, "max_ms")},
        )
        for row in found
    ]
    return sorted(summaries, key=lambda each: (each.connection, -each.counts["dispatched"], each.channel))


def _hours(spark: SparkSession, hourly: DataFrame, channels: Sequence[tuple[str, str]]) -> list[Mapping[str, Any]]:
    """Return the hours of the busiest channels of each connection."""
    chosen: list[tuple[str, str]] = []
    for connection in dict.fromkeys(connection for connection, _ in channels):
        chosen += [each for each in channels if each[0] == connection][:MOST_LINES]
    if not chosen:
        return []
    wanted = spark.createDataFrame(chosen, "connection string, channel string")
    columns = ["hour", "connection", "channel", "p50_ms", "p99_ms", "dispatched"]
    found = hourly.where(F.col("dispatched") > 0).join(F.broadcast(wanted), on=["connection", "channel"])
    return _dicts(found.select(*columns).orderBy("hour").collect())


def _traffic(hourly: DataFrame) -> list[Mapping[str, Any]]:
    names = ("scheduled", "dispatched", "late")
    sums = hourly.groupBy("hour", "connection").agg(*(F.sum(name).alias(name) for name in names))
    return _dicts(sums.orderBy("hour", "connection").collect())


def _curves(frequencies: DataFrame) -> dict[str, Sequence[float]]:
    shares = F.array(*(F.lit(share) for share in CURVE))
    found = frequencies.groupBy("connection").agg(F.percentile("lateness_ms", shares, F.col("n")).alias("curve"))
    return {row["connection"]: list(row["curve"]) for row in found.orderBy("connection").collect()}


def _anomalies(hourly: DataFrame) -> list[Mapping[str, Any]]:
    by = ["connection", "channel"]
    busy = hourly.where(F.col("dispatched") >= _ANOMALY_DISPATCHES)
    usual = busy.groupBy(*by).agg(F.median("p99_ms").alias("usual_ms"), F.count("*").alias("hours"))
    limit = F.greatest(F.col("usual_ms") * ANOMALY_FACTOR, F.col("usual_ms") + ANOMALY_MS)
    found = busy.join(usual.where(F.col("hours") >= _ANOMALY_HOURS), on=by).where(F.col("p99_ms") > limit)
    columns = ["hour", *by, "dispatched", "p99_ms", "usual_ms"]
    return _dicts(found.select(*columns).orderBy(F.desc("p99_ms")).limit(MOST_ANOMALIES).collect())


def _reasons(reasons: DataFrame) -> list[Mapping[str, Any]]:
    by = ["connection", "channel", "change", "reason"]
    found = reasons.groupBy(*by).agg(F.sum("n").alias("n")).orderBy(F.desc("n"), *by)
    return _dicts(found.limit(MOST_REASONS).collect())


def _dicts(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    return [row.asDict() for row in rows]


def _line(each: Summary, options: ReportOptions) -> str:
    in_time = "lateness unknown" if each.in_time is None else f"{each.in_time:.3%} in time"
    return (
        f"{each.connection}: {each.counts['dispatched']:,} dispatched, {in_time} (target {options.slo_target:.3%}"
        f" within {options.slo_seconds:g} s), {each.counts['duplicates']:,} duplicates"
    )
