"""Dispatch the messages of a Kafka ladder with Spark Structured Streaming, past one machine's dispatcher.

It takes the place of `airflow delay dispatcher --kafka CONN` for one ladder: it reads the same records and writes the
same ones to channels and journal, and messages can be cancelled, rescheduled and expedited as before. Messages wait in
the state of a streaming query. A message is never early, and some seconds late by nature: use this job for more
messages than plain dispatchers can handle, not for precision. All records stay in the ladder's topics until they and
those before them are due, so a long delay keeps what was scheduled after it on the disks of Kafka, too.

Run it with Spark's Kafka connector:

    spark-submit --packages org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0 dispatch.py \\
        --connection delay_kafka_default --checkpoint hdfs:///delay/checkpoint

Only one kind of dispatcher serves a ladder. To return to the plain one, stop this job and run it again with --release.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections.abc import Sequence
from threading import Event
from typing import Any

from airflow_delay_provider.domain.exceptions import ConfigurationError, DelayError
from airflow_delay_provider.spark.jobs.command import report_problem

log = logging.getLogger("airflow_delay_provider.spark.dispatch")

#: The shortest time that a plain stop waits for the end of a micro-batch.
STOP_SECONDS = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a ladder until SIGTERM, or give it back; return the exit code."""
    options = _parse(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        _run(options, stop)
    except Exception as error:  # noqa: BLE001 - what is not known is printed in full
        return int(report_problem("dispatch", error).code)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dispatch.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connection", help="Airflow connection of the ladder; default: delay_default")
    parser.add_argument(
        "--connection-file", metavar="FILE", help="a file from `airflow connections export` that contains it"
    )
    parser.add_argument(
        "--checkpoint", required=True, metavar="URI", help="folder of the query's state; never share or delete it"
    )
    parser.add_argument("--shards", type=int, help="tasks that share the work; fixed for a checkpoint; default: 4")
    parser.add_argument(
        "--bucket",
        type=float,
        metavar="SECONDS",
        help="messages that are due within such a time are released together, at its end; fixed for a checkpoint;"
        " default: 0.5",
    )
    parser.add_argument(
        "--trigger", type=float, default=1.0, metavar="SECONDS", help="time between micro-batches; default: 1"
    )
    parser.add_argument(
        "--max-records",
        type=int,
        default=50_000,
        help="most records that a micro-batch reads; lower it for messages of more than 10 kB, because a task keeps its"
        " share of them in memory; default: 50000",
    )
    parser.add_argument(
        "--release",
        action="store_true",
        help="give the ladder back: write all waiting messages to its topics, so that plain dispatchers continue;"
        " safe to repeat",
    )
    return parser.parse_args(argv)


def _run(options: argparse.Namespace, stop: Event) -> None:
    from airflow_delay_provider.spark.streaming.release import release
    from airflow_delay_provider.spark.streaming.service import DispatchService, ServiceOptions
    from airflow_delay_provider.spark.streaming.takeover import routing_of

    config = _find_config(options)
    spark = _open_session()
    service = None
    try:
        given = {"shards": options.shards, "bucket_ms": options.bucket and round(options.bucket * 1000)}
        wanted = ServiceOptions(
            checkpoint=options.checkpoint,
            routing=routing_of(spark, options.checkpoint, given),
            trigger_seconds=options.trigger,
            max_records=options.max_records,
        )
        service = DispatchService(spark, config, wanted)
        if options.release:
            release(spark, config, service, wanted)
        else:
            _serve(service, stop)
    finally:
        if service is not None:
            service.close()
        spark.stop()


def _serve(service: Any, stop: Event) -> None:
    from airflow_delay_provider.spark.streaming.service import PROGRESS_SECONDS

    query = service.start_query(service.open())
    log.info("Serving the ladder")
    shown_at = time.monotonic()
    try:
        while not stop.wait(0.2):
            if not query.isActive:
                raise _failure_of(query, service)
            service.membership.require()
            if time.monotonic() > shown_at + PROGRESS_SECONDS:
                log.info(service.describe_progress(query))
                shown_at = time.monotonic()
        log.info("Stopping after this micro-batch")
        deadline = time.monotonic() + STOP_SECONDS
        while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        query.stop()


def _failure_of(query: Any, service: Any) -> DelayError:
    from airflow_delay_provider.domain.exceptions import BrokerError

    service.membership.require()
    return BrokerError(
        f"the query has failed and continues from its checkpoint when it is started again: {_why(query)}"
    )


def _why(query: Any) -> str:
    lines = [line.strip() for line in str(query.exception() or "it was stopped").splitlines() if line.strip()]
    told = [line for line in lines if "airflow_delay_provider.domain.exceptions." in line]
    return told[-1].partition(": ")[2] if told else " ".join(lines)[:1000]


def _find_config(options: argparse.Namespace) -> Any:
    from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
    from airflow_delay_provider.spark.connection import find_job_connection

    connection = find_job_connection(options.connection, hold="broker", connection_file=options.connection_file)
    broker = connection.open()
    try:
        if not isinstance(broker, KafkaBroker):
            raise ConfigurationError(
                f"--connection: {connection.conn_id!r} is of type {connection.conn_type!r}; use one of Kafka"
            )
        return broker.config
    finally:
        broker.close()


def _open_session() -> Any:
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.appName("airflow-delay-dispatch").getOrCreate()
    spark.sparkContext.setLogLevel("WARN")
    try:
        spark.readStream.format("kafka").option("kafka.bootstrap.servers", "x").option("subscribe", "x").load()
    except Exception as error:
        spark.stop()
        raise ConfigurationError(
            "--packages: Spark's Kafka connector is missing; add --packages"
            f" org.apache.spark:spark-sql-kafka-0-10_2.13:{spark.version} to spark-submit, or its files with --jars"
        ) from error
    return spark


if __name__ == "__main__":
    sys.exit(main())
