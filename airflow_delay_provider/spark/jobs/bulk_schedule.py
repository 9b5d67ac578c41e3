"""Schedule each row of files or of a table as a message: ``spark-submit bulk_schedule.py --help``."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence

from airflow_delay_provider.spark.jobs.bulk.arguments import NAME, parse_arguments
from airflow_delay_provider.spark.jobs.bulk.columns import shape_columns
from airflow_delay_provider.spark.jobs.bulk.result import Result
from airflow_delay_provider.spark.jobs.bulk.schedule import check, prepare_report, schedule, write_report
from airflow_delay_provider.spark.jobs.bulk.table import read_table
from airflow_delay_provider.spark.jobs.command import ExitCode, JobError, run_command, say, spark_session


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job and return its exit code."""
    return run_command(NAME, lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> None:
    arguments = parse_arguments(argv)
    report = prepare_report(arguments)
    with spark_session(f"delay {NAME}", verbose=arguments.verbose) as spark:
        rows = shape_columns(read_table(spark, arguments), arguments)
        if arguments.partitions:
            rows = rows.repartition(arguments.partitions)
        began = time.monotonic()
        result = check(spark, rows, arguments) if arguments.dry_run else schedule(spark, rows, arguments)
        seconds = time.monotonic() - began
    say(f"{NAME}: {result.describe(seconds, dry_run=arguments.dry_run)}")
    if report is not None:
        write_report(report, result, seconds, arguments)
    if result.rejected and arguments.on_rejects == "fail":
        raise JobError(
            f"--on-rejects: {result.rejected} of {result.rows} rows were rejected{_example(result)};"
            f" {_remedy(result, arguments)}",
            code=ExitCode.REJECTS,
        )


def _example(result: Result) -> str:
    return f", the first because of {result.first_reasons[0]!r}" if result.first_reasons else ""


def _remedy(result: Result, arguments: Namespace) -> str:
    if arguments.dry_run:
        return "correct them, or schedule the others with --rejects FOLDER"
    if arguments.rejects:
        return f"correct them in {arguments.rejects} and schedule that folder (--format json)"
    if result.knows_ids:
        return "give --rejects FOLDER to get all of them, and schedule the same input again"
    return (
        "to get all of them, schedule the same input again with --rejects FOLDER if your consumers ignore repeated ids:"
        " this broker does not know ids, and sends all other rows twice then"
    )


if __name__ == "__main__":
    sys.exit(main())
