"""Schedule the rows, or only check them, and write the report."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.datasource.locations import Location
from airflow_delay_provider.spark.jobs.bulk.arguments import DATA_SOURCE, NAME
from airflow_delay_provider.spark.jobs.bulk.check import CheckDataSource
from airflow_delay_provider.spark.jobs.bulk.result import Result
from airflow_delay_provider.spark.jobs.command import progress
from airflow_delay_provider.spark.kafka_sink import InboxRejectsError, write_to_inbox


def schedule(spark: SparkSession, rows: DataFrame, arguments: Namespace) -> Result:
    """Schedule all good rows; rejected rows are in the result, whatever ``--on-rejects`` says."""
    with progress(spark, f"{NAME}: scheduling"):
        if arguments.via == DATA_SOURCE:
            return _write(rows, "delay", data_source_options(arguments))
        return _write_to_inbox(rows, arguments)


def check(spark: SparkSession, rows: DataFrame, arguments: Namespace) -> Result:
    """Check all rows and schedule none."""
    spark.dataSource.register(CheckDataSource)
    options = data_source_options(arguments)
    # Nothing is written, so nothing can be lost.
    for name in ("rejects", "onRejects"):
        options.pop(name, None)
    with progress(spark, f"{NAME}: checking"):
        return _write(rows, CheckDataSource.name(), options)


def prepare_report(arguments: Namespace) -> Location | None:
    """Return the file of ``--report``, once it is known that it can be written."""
    if not arguments.report:
        return None
    location = Location.parse("--report", arguments.report)
    location.prepare_file()
    return location


def write_report(report: Location, result: Result, seconds: float, arguments: Namespace) -> None:
    """Write the counts and the duration as JSON."""
    content = result.as_json(
        seconds,
        input=arguments.input or arguments.table,
        connection=arguments.connection or "delay_default",
        via=arguments.via,
        dry_run=arguments.dry_run,
    )
    try:
        report.write(json.dumps(content, indent=2).encode() + b"\n")
    except ConfigurationError as error:
        if arguments.dry_run:
            raise
        raise ConfigurationError(f"{error}; all good rows are scheduled, so do not schedule them again") from None


def data_source_options(arguments: Namespace) -> dict[str, str]:
    """Return the options of the data source; None means its default."""
    given = {
        "connection": arguments.connection,
        "connectionFile": arguments.connection_file,
        "hold": arguments.hold,
        "channel": arguments.channel,
        "onConflict": arguments.on_conflict,
        "onPast": arguments.on_past,
        "onRejects": arguments.on_rejects,
        "rejects": arguments.rejects,
        "idPrefix": arguments.id_prefix or None,
        "batchSize": arguments.batch_size,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _write_to_inbox(rows: DataFrame, arguments: Namespace) -> Result:
    reasons = []
    try:
        report = write_to_inbox(
            rows,
            arguments.connection,
            connection_file=arguments.connection_file,
            channel=arguments.channel,
            on_past=arguments.on_past,
            on_rejects=arguments.on_rejects,
            rejects=arguments.rejects,
            id_prefix=arguments.id_prefix,
        )
    except InboxRejectsError as error:
        report, reasons = error.report, [str(error)]
    return Result(
        rows=report.rows,
        outcomes={"scheduled": report.scheduled},
        rejected=report.rejected,
        first_reasons=reasons,
        rejects=None if arguments.rejects is None else report.rejects,
    )


def _write(rows: DataFrame, data_source: str, options: Mapping[str, str]) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        try:
            rows.write.format(data_source).mode("append").options(**options, report=str(report)).save()
        except Exception:
            # The data source writes its report also if it fails because of rejects.
            if not report.exists():
                raise
        return Result.from_report(json.loads(report.read_text()))
