"""Schedule the rows, or only check them, and write the report."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from airflow_delay_provider.spark.connection import find_job_connection
from airflow_delay_provider.spark.datasource.locations import Location
from airflow_delay_provider.spark.datasource.options import WriteOptions
from airflow_delay_provider.spark.datasource.schema import check_schema
from airflow_delay_provider.spark.jobs.bulk.arguments import DATA_SOURCE, NAME
from airflow_delay_provider.spark.jobs.bulk.check import RowCheck, check_rows
from airflow_delay_provider.spark.jobs.bulk.result import Result
from airflow_delay_provider.spark.jobs.command import progress


def schedule(spark: SparkSession, rows: DataFrame, arguments: Namespace) -> Result:
    """Schedule all good rows; rejected rows are in the result, whatever ``--on-rejects`` says."""
    with progress(spark, f"{NAME}: scheduling"):
        if arguments.via == DATA_SOURCE:
            return _write(rows, arguments)
        raise NotImplementedError


def check(spark: SparkSession, rows: DataFrame, arguments: Namespace) -> Result:
    """Check all rows and schedule none."""
    options = WriteOptions.parse(data_source_options(arguments))
    check_schema(rows.schema, channel=options.channel)
    connection = find_job_connection(options.connection, hold=options.hold, connection_file=options.connection_file)
    with connection.open() as broker:
        limits = broker.limits
    with progress(spark, f"{NAME}: checking"):
        return check_rows(rows, RowCheck(options=options, limits=limits))


def write_report(result: Result, seconds: float, arguments: Namespace) -> None:
    """Write the counts and the duration as JSON."""
    report = result.as_json(
        seconds,
        input=arguments.input or arguments.table,
        connection=arguments.connection or "delay_default",
        via=arguments.via,
        dry_run=arguments.dry_run,
    )
    Location.parse("--report", arguments.report).write(json.dumps(report, indent=2).encode() + b"\n")


def data_source_options(arguments: Namespace) -> dict[str, str]:
    """Return the options of the data source; None means its default."""
    given = {
        "connection": arguments.connection,
        "connectionFile": arguments.connection_file,
        "hold": arguments.hold,
        "channel": arguments.channel,
        "onConflict": arguments.on_conflict,
        "onPast": arguments.on_past,
        "onRejects": "fail" if arguments.dry_run else arguments.on_rejects,
        "rejects": None if arguments.dry_run else arguments.rejects,
        "idPrefix": arguments.id_prefix or None,
        "batchSize": arguments.batch_size,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _write(rows: DataFrame, arguments: Namespace) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = {**data_source_options(arguments), "report": str(report)}
        try:
            rows.write.format("delay").mode("append").options(**options).save()
        except Exception:
            # The data source writes its report also if it fails because of rejects.
            if not report.exists():
                raise
        return Result.from_report(json.loads(report.read_text()))
