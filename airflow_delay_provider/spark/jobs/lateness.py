"""Report how late messages are: journals to Parquet, hourly figures, and a page with plots.

    spark-submit lateness.py --connection delay_default --connection my_kafka --output /data/lateness

A run reads what is new since the run before; run it once a day, one run at a time. Of two, the later one fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING
from uuid import uuid4

from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.datasource.journal import journal_end, journal_gap
from airflow_delay_provider.spark.datasource.positions import JournalPosition
from airflow_delay_provider.spark.datasource.read_options import RETENTION_DAYS, OnGap
from airflow_delay_provider.spark.jobs import lateness_figures as figures
from airflow_delay_provider.spark.jobs.command import ExitCode, JobError, UsageError, run_command, spark_session
from airflow_delay_provider.spark.jobs.lateness_folder import (
    ENTRIES,
    FREQUENCIES,
    HOURLY,
    REASONS,
    FolderState,
    Gap,
    ReportFolder,
    Run,
)
from airflow_delay_provider.spark.jobs.lateness_report import Report, ReportOptions, write_report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAME = "lateness"


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
    return run_command(NAME, lambda: _start(_parse(argv)))


def _start(options: JobOptions) -> None:
    with spark_session(f"delay {NAME}") as spark:
        _run(spark.newSession(), options)


def _run(spark: SparkSession, options: JobOptions) -> None:
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    folder = ReportFolder(options.output)
    stored = folder.read_state()
    if options.full:
        _warn_of_full(stored, options)
    before = FolderState() if options.full else stored
    until = _journal_ends(options)
    reads = {name: _read_options(options, name, after=before.positions.get(name), until=until[name]) for name in until}
    gaps = _accept_gaps(options, reads)
    folder.begin()
    found_runs = folder.find_runs()
    run = _copy_entries(spark, folder, reads)
    state = replace(
        before,
        runs=(*before.runs, *([run] if run.entries else [])),
        positions={**before.positions, **until},
        gaps=(*before.gaps, *gaps),
        slo_seconds=options.report.slo_seconds,
    )
    days = _days_to_compute(before, state, run)
    _compute(spark, folder, state, run.id, days=days, slo_seconds=options.report.slo_seconds)
    state = replace(state, figures={**before.figures, **dict.fromkeys(days, run.id)})
    folder.commit(state, before=stored)
    folder.remove_unnamed(state, {*found_runs, run.id})
    report = write_report(spark, folder, state, options.report, say=_say)
    _say(f"report: {folder.at('report.html')}")
    if options.fail_on_slo:
        _require_target(report, options, where=folder.at("report.html"))


def _warn_of_full(stored: FolderState, options: JobOptions) -> None:
    """Say what ``--full`` removes, and refuse to remove entries that it does not read again."""
    if others := sorted(set(stored.positions) - set(options.connections)):
        raise UsageError(
            "--full",
            f"the folder also has entries of {', '.join(map(repr, others))}, which would be lost",
            "name them with --connection, too, or use another folder",
        )
    if stored.runs:
        _say(
            f"warning: --full replaces {sum(run.entries for run in stored.runs):,} entries of {len(stored.days)} days"
            " by what the journals still have; use another folder to keep older ones"
        )


def _days_to_compute(before: FolderState, state: FolderState, run: Run) -> list[str]:
    """Return the days whose figures change; each day looks for duplicates in the day before, too."""
    if before.slo_seconds != state.slo_seconds:
        return state.days
    return [day for day in state.days if day in run.days or _day_before(day) in run.days]


def _require_target(report: Report, options: JobOptions, *, where: str) -> None:
    if missed := report.missed(options.connections):
        raise JobError(
            f"--fail-on-slo: {', '.join(each.connection for each in missed)} missed the target of"
            f" {options.report.slo_target:.3%} within {options.report.slo_seconds:g} s; see {where}",
            code=ExitCode.SLO_MISSED,
        )


def _journal_ends(options: JobOptions) -> dict[str, str]:
    ends: dict[str, str] = {}
    positions: dict[str, JournalPosition] = {}
    for name in options.connections:
        ends[name] = journal_end(name, connection_file=options.connection_file, copied=name in options.copied)
        position = JournalPosition.parse(name, ends[name])
        for other, theirs in positions.items():
            if position.overlaps(theirs):
                raise ConfigurationError(
                    f"connection: {other!r} and {name!r} have the same journal, so its entries would count twice;"
                    " name one of them"
                )
        positions[name] = position
    return ends


def _accept_gaps(options: JobOptions, reads: Mapping[str, dict[str, str]]) -> list[Gap]:
    """Refuse deleted entries that were not read, or let these reads go on behind them."""
    gaps = []
    for name, read in reads.items():
        reason = journal_gap(read)
        if reason is None:
            continue
        if not options.accept_gap:
            raise ConfigurationError(
                f"{name}: {reason}; add --accept-gap to go on with the entries that are left, and the report says it"
            )
        read["onGap"] = OnGap.CONTINUE
        since, until = (JournalPosition.parse(each, read[each]).taken_at.date() for each in ("after", "until"))
        gaps.append(Gap(connection=name, since=str(since), until=str(until), reason=reason))
        _say(f"warning: {name}: {reason}")
    return gaps


def _copy_entries(spark: SparkSession, folder: ReportFolder, reads: Mapping[str, Mapping[str, str]]) -> Run:
    """Write the new entries of all journals to the folder of this run."""
    began = time.monotonic()
    run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid4().hex[:8]}"
    frames = [spark.read.format("delay").options(**read).load() for read in reads.values()]
    for name, read in reads.items():
        _say(f"{name}: reading the journal {'after the last run' if 'after' in read else 'from its beginning'}")
    entries = figures.with_day(reduce(lambda one, other: one.unionByName(other), frames))
    entries.write.mode("overwrite").partitionBy("day").parquet(folder.run(run_id))
    written = _entries(spark, [folder.run(run_id)], base=folder.at(ENTRIES))
    by_day = {str(row["day"]): int(row["count"]) for row in written.groupBy("day").count().collect()}
    run = Run(id=run_id, entries=sum(by_day.values()), days=tuple(sorted(by_day)))
    _say(f"{run.entries:,} new entries of {len(run.days)} days in {time.monotonic() - began:.1f} s")
    return run


def _read_options(options: JobOptions, name: str, *, after: str | None, until: str) -> dict[str, str]:
    read = {
        "table": "journal",
        "connection": name,
        "columns": ",".join(figures.ENTRY_COLUMNS),
        "until": until,
        "retentionDays": str(options.retention_days),
    }
    if options.connection_file is not None:
        read["connectionFile"] = options.connection_file
    if options.partitions is not None:
        read["partitions"] = str(options.partitions)
    if name in options.copied:
        read["copied"] = "true"
    return read if after is None else {**read, "after": after}


def _compute(
    spark: SparkSession,
    folder: ReportFolder,
    state: FolderState,
    run_id: str,
    *,
    days: Sequence[str],
    slo_seconds: float,
) -> None:
    """Write the figures of these days; those of other days stay as they are."""
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
        table.repartition("day").write.mode("overwrite").partitionBy("day").parquet(folder.at(name, f"run={run_id}"))
    _say(f"figures of {', '.join(days)} in {time.monotonic() - began:.1f} s")


def _entries(spark: SparkSession, paths: Sequence[str], *, base: str) -> DataFrame:
    if not paths:
        return spark.createDataFrame([], figures.ENTRY_SCHEMA)
    return spark.read.schema(figures.ENTRY_SCHEMA).option("basePath", base).parquet(*paths)


def _day_before(day: str) -> str:
    return str(date.fromisoformat(day) - timedelta(days=1))


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
    parser.add_argument(
        "--fail-on-slo", action="store_true", help="Exit with 3 if a named connection misses the target."
    )
    parser.add_argument("--days", type=int, default=14, metavar="N", help="Days that the report shows; 14.")
    parser.add_argument("--partitions", type=int, metavar="N", help="Tasks per journal; by default its size decides.")
    parser.add_argument(
        "--full",
        action="store_true",
        help="Read the journals from their beginning and replace all. Entries that they no longer have are lost.",
    )
    parser.add_argument(
        "--accept-gap", action="store_true", help="Go on if unread entries were deleted already; the report says it."
    )
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
