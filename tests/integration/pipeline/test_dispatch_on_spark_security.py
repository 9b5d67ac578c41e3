"""The job on Spark with a login that may do what the documentation says, and no more; its password shows nowhere."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from confluent_kafka.admin import AclOperation, ResourcePatternType, ResourceType

from airflow_delay_provider.domain.message import Message
from tests.certificates import Authority
from tests.integration.pipeline.streaming_dispatcher import StreamedLadder, ids_of, streamed_ladder
from tests.kafkas import USERS, client_of, fresh_topic, grant, secured_broker
from tools.servers.kafka import Kafka

pytestmark = pytest.mark.timeout(900)


def allow(broker: Kafka, ladder: StreamedLadder, channel: str) -> None:
    """Grant what docs/kafka.md names."""
    topology, prefixed = ladder.config.topology, ResourcePatternType.PREFIXED
    ladder_rights = (AclOperation.READ, AclOperation.WRITE, AclOperation.DELETE)
    grant(broker, "app", ResourceType.TOPIC, f"{topology.prefix}.", *ladder_rights, pattern=prefixed)
    grant(broker, "app", ResourceType.TOPIC, channel, AclOperation.WRITE)
    grant(broker, "app", ResourceType.GROUP, topology.dispatch_group, AclOperation.READ)
    grant(broker, "app", ResourceType.GROUP, f"{topology.prefix}.spark", AclOperation.READ, pattern=prefixed)
    grant(broker, "app", ResourceType.GROUP, "airflow-delay.reader", AclOperation.DESCRIBE)
    writes = AclOperation.WRITE
    grant(broker, "app", ResourceType.TRANSACTIONAL_ID, f"{topology.prefix}.", writes, pattern=prefixed)


def test_a_job_with_the_documented_permissions_serves_and_its_password_shows_nowhere(
    kafka_connector: str, tmp_path: Path
):
    authority = Authority(tmp_path)
    with secured_broker(tmp_path, authority) as broker:
        login = {"host": broker.bootstrap_of("SASL_SSL"), "client": client_of("app", authority)}
        folder = tmp_path / "job"
        folder.mkdir()
        with streamed_ladder(broker.bootstrap, kafka_connector, folder, **login) as ladder, ladder.open() as client:
            channel = fresh_topic(broker.bootstrap)
            allow(broker, ladder, channel)
            ladder.start()
            due = client.clock.now() + timedelta(seconds=2)
            sent = Message(id="m", channel=channel, payload=b"", deliver_at=due)
            client.schedule([sent])
            assert ids_of(ladder.received(channel, 1)) == [sent.id]
            ladder.stop()
            files = [file for file in folder.rglob("*") if file.is_file()]
            assert any("events" in file.parts for file in files)
            assert any("offsets" in file.parts for file in files)
            shown = [str(file) for file in files if USERS["app"].encode() in file.read_bytes()]
            assert shown == []
