"""The jobs `dispatch` and `lateness` on a standalone cluster with two workers."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pyarrow.parquet as pq
import pytest
from sqlalchemy.engine import make_url

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.spark.jobs import LATENESS
from tests.databases import fresh_database
from tests.integration.pipeline.streaming_dispatcher import StreamedLadder, ids_of, streamed_ladder
from tests.kafkas import fresh_topic, require_kafka
from tests.sparks import CONF
from tools.servers.spark import SparkCluster, client_environment

pytestmark = pytest.mark.timeout(600)
SECRET = "planted-s3cret"


@pytest.fixture
def ladder(cluster: SparkCluster, kafka_connector: str, tmp_path: Path) -> Iterator[StreamedLadder]:
    """A ladder that the job serves on both workers."""
    with streamed_ladder(require_kafka(), kafka_connector, tmp_path, master=cluster.url) as ladder:
        ladder.start()
        yield ladder


def test_two_executors_deliver_each_message_once_and_never_early(ladder: StreamedLadder, cluster: SparkCluster) -> None:
    """M10"""
    assert sum(application["cores"] for application in cluster.applications()) == 2
    channel = fresh_topic(ladder.bootstrap)
    with ladder.open() as broker:
        now = broker.clock.now()
        due = {uuid4().hex: now + timedelta(milliseconds=1000 + 50 * number) for number in range(60)}
        broker.schedule(
            [Message(id=each, channel=channel, payload=b"x", deliver_at=moment) for each, moment in due.items()]
        )
    records = ladder.received(channel, len(due))
    assert sorted(ids_of(records)) == sorted(due)
    for record, message_id in zip(records, ids_of(records), strict=True):
        assert record.timestamp()[1] >= due[message_id].timestamp() * 1000


def test_a_cluster_reports_lateness_and_shows_the_secret_of_its_connection_nowhere(
    cluster: SparkCluster, tmp_path: Path
) -> None:
    with fresh_database() as url, closing(Ledger(url)) as ledger:
        ledger.migrate()
        past = datetime.now(UTC) - timedelta(seconds=1)
        EmbeddedBroker(ledger).schedule(
            [Message(channel=f"c{number % 2}", payload=b"x", deliver_at=past) for number in range(50)]
        )
        (tmp_path / "events").mkdir()
        # The server trusts its clients, and so takes any password.
        with_password = make_url(url).set(password=SECRET).render_as_string(hide_password=False)
        connection = {"conn_type": "delay", "password": SECRET, "extra": {"ledger_url": with_password}}
        settings = {
            **CONF,
            "spark.cores.max": "2",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": (tmp_path / "events").as_uri(),
        }
        command = ["spark-submit", "--master", cluster.url]
        command += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        command += [LATENESS, "--connection", "orders", "--output", str(tmp_path / "out")]
        ended = subprocess.run(
            command,
            env={**os.environ, **client_environment(), "AIRFLOW_CONN_ORDERS": json.dumps(connection)},
            capture_output=True,
            text=True,
            timeout=400,
        )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr[-3000:]}"
    hours = pq.read_table(tmp_path / "out" / "hourly").to_pylist()
    dispatched = Counter[str]()
    for row in hours:
        dispatched[row["channel"]] += row["dispatched"]
    assert dispatched == {"c0": 25, "c1": 25}
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.parts[len(tmp_path.parts)] for file in written} == {"events", "out"}
    shown = [ended.stdout, ended.stderr, *(file.read_text(errors="replace") for file in written)]
    assert any("SparkListenerApplicationStart" in text for text in shown), "the event log can be read"
    assert [text[:200] for text in shown if SECRET in text] == []
