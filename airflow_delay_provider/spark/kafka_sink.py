"""Schedule a DataFrame through the inbox of a Kafka ladder, with Spark's own Kafka sink: at the speed of the JVM."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql import Observation
from pyspark.sql import functions as f

from airflow_delay_provider.brokers.kafka import header_protocol
from airflow_delay_provider.domain.arguments import OnPast, parse_choice
from airflow_delay_provider.domain.clock import floor_ms
from airflow_delay_provider.domain.exceptions import BrokerError, ConfigurationError
from airflow_delay_provider.spark.connection import find_job_connection
from airflow_delay_provider.spark.datasource.options import OnRejects
from airflow_delay_provider.spark.datasource.rejects import RejectsFolder
from airflow_delay_provider.spark.datasource.schema import check_schema
from airflow_delay_provider.spark.datasource.writer import RejectedRowsError
from airflow_delay_provider.spark.inbox import columns
from airflow_delay_provider.spark.inbox.columns import InboxRules
from airflow_delay_provider.spark.inbox.java_client import JavaClientSettings
from airflow_delay_provider.spark.inbox.rejects import stage
from airflow_delay_provider.spark.inbox.secret_file import settings_from_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from airflow_delay_provider.brokers.kafka.admin import ChannelSettings
    from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
    from airflow_delay_provider.brokers.port import Broker

log = logging.getLogger(__name__)

_SAMPLES = 3
_V1_SOURCES = "spark.sql.sources.useV1SourceList"


@dataclass(frozen=True, kw_only=True)
class InboxReport:
    """What a write has done."""

    #: The topic that the messages were written to.
    inbox: str
    rows: int
    scheduled: int
    rejected: int
    #: The files with the rejected rows.
    rejects: tuple[str, ...] = ()


class InboxRejectsError(RejectedRowsError):
    """Rows were rejected and ``on_rejects="fail"``; all others are scheduled."""

    def __init__(self, report: InboxReport, problem: str) -> None:
        super().__init__(problem)
        self.report = report


def write_to_inbox(
    df: DataFrame,
    connection: str | None = None,
    *,
    connection_file: str | None = None,
    channel: str | None = None,
    channels: Collection[str] | None = None,
    on_past: OnPast | str = OnPast.DELIVER,
    on_rejects: OnRejects | str = OnRejects.FAIL,
    rejects: str | None = None,
    id_prefix: str = "",
) -> InboxReport:
    """Schedule all rows of a DataFrame; return once Kafka has confirmed them on all replicas in sync.

    The columns and rules are those of ``df.write.format("delay")``; derived ids are different ones. The rows are read
    once, and again only if some are rejected. A failed job may have written part of the rows. They have the same ids
    if it is run again, and Kafka delivers both: consumers recognize the second by its ``delay-id``.

    ``deliver_after`` counts from the moment at which the broker stores the message.

    :param connection: id of an Airflow connection to Kafka; by default ``delay_default``.
    :param connection_file: a JSON file of Airflow connections to read instead of asking Airflow.
    :param channel: topic of rows without one of their own.
    :param channels: the topics that rows may name. They are checked before the write, and rows that name others are
        rejected. Otherwise only ``channel`` is checked, and the dispatcher dead-letters messages for missing topics.
    :param on_past: ``deliver`` or ``fail``: what to do with due times that have passed when the write begins.
    :param on_rejects: ``fail`` raises :class:`InboxRejectsError` at the end, ``keep`` does not. All good rows are
        scheduled either way.
    :param rejects: folder for rejected rows, with their reasons, as JSON lines; needed by ``keep``. All machines must
        share it, and each write adds files of its own.
    :param id_prefix: part of derived ids.
    """
    past = parse_choice("on_past", OnPast, on_past)
    policy = parse_choice("on_rejects", OnRejects, on_rejects)
    if policy is OnRejects.KEEP and rejects is None:
        raise ConfigurationError("rejects: on_rejects='keep' needs a folder, or rejected rows would be lost; name one")
    check_schema(df.schema, channel=channel)
    _require_connector(df.sparkSession)
    folder = None if rejects is None else RejectsFolder.prepare(rejects)
    with find_job_connection(connection, connection_file=connection_file).open() as broker:
        ladder = _require_kafka(broker)
        rules = InboxRules(
            topology=ladder.topology,
            limits=ladder.limits,
            channel=channel,
            known=_check_channels(ladder, channel, channels),
            only_known=channels is not None,
            on_past=past,
            id_prefix=id_prefix,
            now_ms=floor_ms(ladder.clock.now()),
        )
        settings = JavaClientSettings.of(ladder.config)
    if settings.unused:
        log.info("Spark's Kafka client has no settings %s; they are not used", ", ".join(settings.unused))
    checked = columns.check_rows(df, rules)
    report = _write(checked, rules, settings)
    if report.rejected:
        report = _keep_rejects(checked, report, folder, fail=policy is OnRejects.FAIL)
    log.info(
        "%s rows: %s scheduled through %s, %s rejected", report.rows, report.scheduled, report.inbox, report.rejected
    )
    return report


def _require_connector(spark: SparkSession) -> None:
    """Refuse a session without Spark's Kafka connector, before anything is created."""
    try:
        # Finds the classes, and asks no broker.
        spark.read.format("kafka").option("kafka.bootstrap.servers", "none:9092").option("subscribe", "none").load()
    except Exception as error:  # Spark's errors have no class in common; their texts name the cause.
        missing = _missing_connector(error)
        if missing is None:
            raise
        raise missing from None


def _missing_connector(error: Exception) -> ConfigurationError | None:
    """Return the error of this package if classes of the connector are missing."""
    found = re.search(r"NoClassDefFoundError: (\S+)|data source: kafka", str(error))
    if found is None:
        return None
    what = f"one of its jars is missing ({found[1]})" if found[1] else "it is not there"
    return ConfigurationError(
        f"spark.jars: Spark cannot use its Kafka connector: {what}; fetch the jars once, as docs/kafka.md shows, and"
        " give them to spark-submit with --jars"
    )


def _require_kafka(broker: Broker) -> KafkaBroker:
    from airflow_delay_provider.brokers.kafka.broker import KafkaBroker

    if not isinstance(broker, KafkaBroker):
        raise ConfigurationError(
            "connection: it does not keep its messages in Kafka, which alone has an inbox; use a connection of type"
            ' delay_kafka with hold="broker", or write with df.write.format("delay")'
        )
    broker.require_topology()
    return broker


def _check_channels(
    broker: KafkaBroker, default: str | None, channels: Collection[str] | None
) -> dict[str, ChannelSettings]:
    named = [*(channels or ()), *([default] if default is not None else [])]
    for channel in named:
        header_protocol.require_destination(channel)
    return broker.channel_settings(named)


def _write(checked: DataFrame, rules: InboxRules, settings: JavaClientSettings) -> InboxReport:
    spark, counts = checked.sparkSession, Observation()
    counted = checked.observe(counts, f.count(f.lit(1)).alias("rows"), f.count(f.col(columns.REASON)).alias("rejected"))
    with settings_from_file(spark.sparkContext, settings.secret) as hidden, _COUNTED.writing(spark):
        options = {f"kafka.{name}": value for name, value in {**settings.plain, **hidden}.items()}
        try:
            columns.records(counted, rules).write.format("kafka").mode("append").options(**options).save()
        except Exception as error:
            explained = _missing_connector(error) or _unconfirmed(error, rules.topology.inbox)
            if explained is None:
                raise
            raise explained from error
    found = counts.get
    rows, rejected = int(found["rows"]), int(found["rejected"])
    return InboxReport(inbox=rules.topology.inbox, rows=rows, scheduled=rows - rejected, rejected=rejected)


def _unconfirmed(error: Exception, inbox: str) -> BrokerError | None:
    """Return the error of this package if Kafka's client is the cause; any other is the job's own."""
    cause = re.search(r"org\.apache\.kafka\.\S*?(\w+(?:Exception|Error)): (.+)", str(error))
    if cause is None:
        return None
    return BrokerError(
        f"Kafka has not confirmed all messages for {inbox} ({cause[1]}: {cause[2][:300]}); part of them may be"
        " scheduled. Check the broker and the connection, and run the job again"
    )


def _keep_rejects(checked: DataFrame, report: InboxReport, folder: RejectsFolder | None, *, fail: bool) -> InboxReport:
    """Write the rejected rows down; raise if they are to fail the job."""
    found = columns.rejects(checked)
    if folder is None:
        samples = "; ".join(row.reason for row in found.limit(_SAMPLES).collect())
        raise InboxRejectsError(
            report, f"rejects: {_rejected(report)}, for example {samples}. Give a folder to get all of them"
        )
    parts = stage(found, folder)
    try:
        folder.publish(list(parts))
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} ({_rejected(report)})") from None
    files = folder.file_of("*.jsonl").text
    if (kept := sum(parts.values())) != report.rejected:
        # No verdict on rows, so it ends the job whatever on_rejects says.
        raise ConfigurationError(
            f"rejects: {_rejected(report)}, but {kept} when the rows were read again for {files}; read from stored"
            " data, or cache() the DataFrame"
        )
    report = replace(report, rejects=tuple(folder.file_of(part).text for part in sorted(parts)))
    if fail:
        raise InboxRejectsError(report, f"rejects: {_rejected(report)}; see {files}")
    return report


def _rejected(report: InboxReport) -> str:
    return f"{report.rejected} of {report.rows} rows were rejected, and all others are scheduled"


class _CountedWrites:
    """Has sessions write to Kafka in the newer of Spark's two ways while a write runs: the older reports no counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: How many writes run in a session, and its setting before the first.
        self._running: dict[str, tuple[int, str]] = {}

    @contextmanager
    def writing(self, spark: SparkSession) -> Iterator[None]:
        session = str(spark._jsparkSession.sessionUUID())
        with self._lock:
            running, before = self._running.get(session) or (0, str(spark.conf.get(_V1_SOURCES)))
            self._running[session] = running + 1, before
            spark.conf.set(_V1_SOURCES, ",".join(each for each in before.split(",") if each.strip() != "kafka"))
        try:
            yield
        finally:
            with self._lock:
                running, before = self._running.pop(session)
                if running > 1:
                    self._running[session] = running - 1, before
                else:
                    spark.conf.set(_V1_SOURCES, before)


_COUNTED = _CountedWrites()
