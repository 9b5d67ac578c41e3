"""Report how late messages are: journals to Parquet, hourly figures, and a page with plots.

    spark-submit lateness.py --connection delay_default --connection my_kafka --output /data/lateness

A run reads what is new since the run before; run it once a day, one run at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from hashlib import sha256
from typing import TYPE_CHECKING

from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.datasource.journal import journal_end
from airflow_delay_provider.spark.datasource.positions import JournalPosition
from airflow_delay_provider.spark.datasource.read_options import RETENTION_DAYS
from airflow_delay_provider.spark.jobs import lateness_figures as figures
from airflow_delay_provider.spark.jobs.command import report_problem, spark_session
from airflow_delay_provider.spark.jobs.lateness_folder import (
    ENTRIES,
    FREQUENCIES,
    HOURLY,
    REASONS,
    FolderState,
    ReportFolder,
    Run,
)
from airflow_delay_provider.spark.jobs.lateness_report import ReportOptions, write_report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAME = "lateness"
OK, FAILED, USAGE, SLO_MISSED = 0, 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of one run, checked."""

    connections: tuple[str, ...]
    #: Those of them whose copy in the ledger is read.
    copied: frozenset[str]
    connection_file: str | None
    output: str
    partitions: int | None
    full: bool
    accept_gap: bool
    retention_days: float
    fail_on_slo: bool
    report: ReportOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job and return its exit code."""
    options = _parse(argv)
    try:
        with spark_session(f"delay {NAME}") as spark:
            return _run(spark.newSession(), options)
    except Exception as error:  # noqa: BLE001 - what is not known is printed in full
        report_problem(NAME, error)
        return FAILED


def _run(spark: SparkSession, options: JobOptions) -> int:
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    folder = ReportFolder(options.output)
    stored = folder.read_state()
    for name in folder.remove_other_runs(stored):
        _say(f"removed {name}, which an earlier run left unfinished")
    before = FolderState() if options.full else stored
    after = {name: before.positions[name] for name in options.connections if name in before.positions}
    until = _journal_ends(options)
    run = _copy_entries(spark, options, folder, after=after, until=until)
    state = replace(
        before,
        runs=(*before.runs, *([run] if run.entries else [])),
        positions={**before.positions, **until},
        slo_seconds=options.report.slo_seconds,
    )
    is_other_limit = before.slo_seconds not in (None, state.slo_seconds)
    days = state.days if options.full or is_other_limit else sorted(run.days)
    _compute(spark, folder, state, days=days, slo_seconds=options.report.slo_seconds)
    folder.commit(state, before=stored)
    if options.full:
        folder.remove_other_runs(state)
        folder.remove_other_days(state)
    kept = write_report(spark, folder, state, options.report, say=_say)
    _say(f"report: {folder.at('report.html')}")
    return OK if kept or not options.fail_on_slo else SLO_MISSED


def _journal_ends(options: JobOptions) -> dict[str, str]:
    ends: dict[str, str] = {}
    journals: dict[str, str] = {}
    for name in options.connections:
        ends[name] = journal_end(name, connection_file=options.connection_file, copied=name in options.copied)
        journal = JournalPosition.parse(name, ends[name]).journal
        if journal in journals:
            raise ConfigurationError(
                f"connection: {journals[journal]!r} and {name!r} have the same journal, so its entries would count"
                " twice; name one of them"
            )
        journals[journal] = name
    return ends


def _copy_entries(
    spark: SparkSession,
    options: JobOptions,
    folder: ReportFolder,
    *,
    after: Mapping[str, str],
    until: Mapping[str, str],
) -> Run:
    """Write the new entries of all journals to the folder of this run."""
    began = time.monotonic()
    run_id = _run_id(after, until)
    frames = [_read(spark, options, name, after=after.get(name), until=end) for name, end in until.items()]
    for name in until:
        _say(f"{name}: reading the journal {'after the last run' if name in after else 'from its beginning'}")
    entries = figures.with_day(reduce(lambda one, other: one.unionByName(other), frames))
    entries.write.mode("overwrite").partitionBy("day").parquet(folder.run(run_id))
    written = _entries(spark, [folder.run(run_id)], base=folder.at(ENTRIES))
    by_day = {str(row["day"]): int(row["count"]) for row in written.groupBy("day").count().collect()}
    run = Run(id=run_id, entries=sum(by_day.values()), days=tuple(sorted(by_day)))
    _say(f"{run.entries:,} new entries of {len(run.days)} days in {time.monotonic() - began:.1f} s")
    return run


def _read(spark: SparkSession, options: JobOptions, name: str, *, after: str | None, until: str) -> DataFrame:
    reader = spark.read.format("delay").option("table", "journal").option("connection", name)
    reader = reader.option("columns", ",".join(figures.ENTRY_COLUMNS)).option("until", until)
    reader = reader.option("retentionDays", str(options.retention_days))
    if options.connection_file is not None:
        reader = reader.option("connectionFile", options.connection_file)
    if options.partitions is not None:
        reader = reader.option("partitions", str(options.partitions))
    if name in options.copied:
        reader = reader.option("copied", "true")
    if options.accept_gap:
        reader = reader.option("onGap", "continue")
    return (reader if after is None else reader.option("after", after)).load()


def _compute(
    spark: SparkSession, folder: ReportFolder, state: FolderState, *, days: Sequence[str], slo_seconds: float
) -> None:
    """Replace the figures of these days; those of other days stay as they are."""
    if not days:
        _say("no new entries: the figures stay as they are")
        return
    began = time.monotonic()
    base = folder.at(ENTRIES)
    own = _entries(spark, folder.entries_of(state, days), base=base)
    with_days_before = sorted({*days, *(_day_before(day) for day in days)})
    wider = _entries(spark, folder.entries_of(state, with_days_before), base=base)
    tables = {
        HOURLY: figures.hourly_figures(wider, slo_seconds=slo_seconds, days=days),
        FREQUENCIES: figures.lateness_frequencies(own),
        REASONS: figures.failure_reasons(own),
    }
    for name, table in tables.items():
        table.repartition("day").write.mode("overwrite").partitionBy("day").parquet(folder.at(name))
    _say(f"figures of {', '.join(days)} in {time.monotonic() - began:.1f} s")


def _entries(spark: SparkSession, paths: Sequence[str], *, base: str) -> DataFrame:
    if not paths:
        return spark.createDataFrame([], figures.ENTRY_SCHEMA)
    return spark.read.schema(figures.ENTRY_SCHEMA).option("basePath", base).parquet(*paths)


def _day_before(day: str) -> str:
    return str(date.fromisoformat(day) - timedelta(days=1))


def _run_id(after: Mapping[str, str], until: Mapping[str, str]) -> str:
    """Return a name that says which entries are in it: those between these positions."""
    return sha256(json.dumps([dict(after), dict(until)], sort_keys=True).encode()).hexdigest()[:16]


def _parse(argv: Sequence[str] | None) -> JobOptions:
    parser = argparse.ArgumentParser(prog="lateness", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--connection", action="append", metavar="CONN", help="Read this journal. Can be repeated.")
    parser.add_argument(
        "--copied", action="append", default=[], metavar="CONN", help="Read the copy of this journal in the ledger."
    )
    parser.add_argument("--connection-file", metavar="FILE", help="Connections, exported by Airflow as JSON.")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="Folder or URI for entries and report.")
    parser.add_argument("--slo-seconds", type=float, default=5.0, metavar="S", help="Later than this is late; 5.")
    parser.add_argument("--slo-target", type=float, default=0.99, metavar="SHARE", help="Share in time; 0.99.")
    parser.add_argument("--fail-on-slo", action="store_true", help=f"Exit with {SLO_MISSED} if the target is missed.")
    parser.add_argument("--days", type=int, default=14, metavar="N", help="Days that the report shows; 14.")
    parser.add_argument("--partitions", type=int, metavar="N", help="Tasks per journal; by default its size decides.")
    parser.add_argument("--full", action="store_true", help="Read the journals from their beginning, replace all.")
    parser.add_argument("--accept-gap", action="store_true", help="Go on if unread entries were deleted already.")
    parser.add_argument(
        "--retention-days", type=float, default=RETENTION_DAYS, metavar="D", help="As the dispatcher's; 30."
    )
    given = parser.parse_args(argv)
    if not 0 < given.slo_target < 1:
        parser.error("--slo-target: must be between 0 and 1, such as 0.99")
    for name in ("slo_seconds", "days", "partitions", "retention_days"):
        if getattr(given, name) is not None and not getattr(given, name) > 0:
            parser.error(f"--{name.replace('_', '-')}: must be more than 0")
    connections = tuple(dict.fromkeys(given.connection or ["delay_default"]))
    for name in given.copied:
        if name not in connections:
            parser.error(f"--copied: {name!r} is not among the connections; add --connection {name}")
    return JobOptions(
        connections=connections,
        copied=frozenset(given.copied),
        connection_file=given.connection_file,
        output=given.output,
        partitions=given.partitions,
        full=given.full,
        accept_gap=given.accept_gap,
        retention_days=given.retention_days,
        fail_on_slo=given.fail_on_slo,
        report=ReportOptions(slo_seconds=given.slo_seconds, slo_target=given.slo_target, days=given.days),
    )


def _say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S}  {text}", flush=True)  # noqa: T201 - progress


if __name__ == "__main__":
    sys.exit(main())
