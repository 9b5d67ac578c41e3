"""The brokers to which tests write DataFrames, each with its connection in a file and a channel of the test's own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pyspark.sql import DataFrame

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.spark.connection import find_job_connection
from tests import kafkas, rabbits
from tests.kafkas import delete_ladder, fresh_topic, require_kafka
from tests.rabbits import declare_queue, require_rabbitmq

CONN_ID = "delay_pipeline"
#: Where messages can go, by the name of their broker.
BROKERS = ("sqlite", "postgresql", "rabbitmq", "kafka")
#: Brokers that keep no second message with an id.
KNOWS_IDS = ("sqlite", "postgresql")
PATIENCE_SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class Target:
    """A broker to write to."""

    broker: str
    channel: str
    #: Of the data source; they name the file with the connection.
    options: dict[str, str]

    def write(self, rows: DataFrame, **options: str) -> None:
        """Schedule the rows."""
        rows.write.format("delay").mode("append").options(**self.options | options).save()

    def open(self) -> Broker:
        """Open the broker, as a task does."""
        connection = find_job_connection(
            CONN_ID, hold=self.options.get("hold"), connection_file=self.options["connectionFile"]
        )
        return connection.open()

    def received(self, n: int) -> list[Message]:
        """Return what is in the channel: ``n`` messages or more."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        with self.open() as broker:
            found: list[Message] = []
            while True:
                deliveries = broker.receive(self.channel, limit=1000)
                found += [delivery.message for delivery in deliveries]
                broker.ack(deliveries)
                if len(found) >= n and not deliveries:
                    return found
                assert time.monotonic() < deadline, f"{len(found)} of {n} messages arrived in {self.channel}"

    def scheduled_ids(self) -> list[str]:
        """Return the id of each message that the journal of the ledger knows as scheduled."""
        ids, position = list[str](), "0:0"
        with self.open() as broker:
            while entries := broker.read_journal(after=position):
                position = entries[-1].position
                ids += [entry.message_id for entry in entries if entry.change is Change.SCHEDULED]
        return ids


def target_of(broker: str, folder: Path, connection: dict[str, Any], channel: str, **options: str) -> Target:
    """Return a target whose connection is written to a file in ``folder``."""
    file = folder / f"{broker}-{uuid4().hex}.json"
    file.write_text(json.dumps({CONN_ID: connection}))
    return Target(
        broker=broker,
        channel=channel,
        options={"connection": CONN_ID, "connectionFile": str(file), "channel": channel, **options},
    )


@contextmanager
def serving(broker: str, folder: Path, request: pytest.FixtureRequest, *, hold: str | None = None) -> Iterator[Target]:
    """Yield a target on one of BROKERS; a Kafka ladder is deleted at the end."""
    options = {} if hold is None else {"hold": hold}
    ledger = {"ledger_url": request.getfixturevalue("postgres_url")} if hold == "ledger" else {}
    with ExitStack() as stack:
        match broker:
            case "sqlite" | "postgresql":
                url = request.getfixturevalue("sqlite_url" if broker == "sqlite" else "postgres_url")
                connection: dict[str, Any] = {"conn_type": "delay", "extra": {"ledger_url": url}}
                channel = f"test-{uuid4().hex}"
            case "rabbitmq":
                connection = rabbits.connection_of(require_rabbitmq(), tick=0.1, **ledger)
                channel = f"test-{uuid4().hex}"
                declare_queue(require_rabbitmq(), channel, **{"x-queue-type": "quorum"})
            case "kafka":
                ladder = {"ladder": f"test-{uuid4().hex[:8]}", "partitions": 2}
                connection = kafkas.connection_of(require_kafka(), **ladder, **ledger)
                channel = fresh_topic(require_kafka())
        target = target_of(broker, folder, connection, channel, **options)
        if broker == "kafka" and hold is None:
            stack.callback(_delete_ladder, target)
        yield target


def _delete_ladder(target: Target) -> None:
    with target.open() as broker:
        assert isinstance(broker, KafkaBroker)
        delete_ladder(broker)
