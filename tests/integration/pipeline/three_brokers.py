"""A ledger on PostgreSQL, a RabbitMQ and a Kafka of a test's own, with a dispatcher, behind one file of connections."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from confluent_kafka.admin import AdminClient, NewTopic
from sqlalchemy import text

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.domain.lifecycle import JournalEntry
from airflow_delay_provider.spark.connection import find_job_connection
from tests import kafkas, rabbits
from tests.databases import fresh_database
from tools.servers.component import wait_for

LEDGER, RABBIT, STREAM = "ledger", "rabbit", "stream"
ALL = (LEDGER, RABBIT, STREAM)
PATIENCE_SECONDS = 120


@dataclass
class ThreeBrokers:
    """The brokers by connection, and the dispatcher that serves them."""

    connection_file: Path
    ledger_url: str
    rabbit_url: str
    bootstrap: str
    brokers: dict[str, Broker] = field(default_factory=dict)
    dispatcher: Dispatcher | None = None
    ledger: Ledger | None = None

    def options(self, connection: str, **more: str) -> dict[str, str]:
        """Options with which Spark reads one of them."""
        return {"connection": connection, "connectionFile": str(self.connection_file), **more}

    def open(self, connection: str) -> Broker:
        """Open a broker as an executor does."""
        return find_job_connection(connection, connection_file=str(self.connection_file)).open()

    def channel(self, connection: str, name: str) -> str:
        """Make a channel where the broker needs it to exist, and return its name."""
        if connection == RABBIT:
            rabbits.declare_queue(self.rabbit_url, name)
        if connection == STREAM:
            # All tests share the topics of one Kafka.
            name = f"{name}-{uuid4().hex[:6]}"
            with AdminClient({"bootstrap.servers": self.bootstrap}) as admin:
                kafkas.create_topic(admin, NewTopic(name, 1))
        return name

    def start_dispatcher(self) -> None:
        """Start one that also copies the journals of the brokers into the ledger."""
        config = DispatcherConfig(kafka=(STREAM,), index=(RABBIT, STREAM), health_port=None)
        self.ledger = Ledger(self.ledger_url)
        self.dispatcher = Dispatcher(self.ledger, open_broker=self.open, config=config)
        self.dispatcher.start()

    def stop_dispatcher(self) -> None:
        """Stop it, if it runs."""
        if self.dispatcher is not None:
            assert self.dispatcher.stop()
            self.dispatcher = None
        if self.ledger is not None:
            self.ledger.close()
            self.ledger = None

    def read_until(
        self, connection: str, what: str, is_complete: Callable[[Sequence[JournalEntry]], bool]
    ) -> list[JournalEntry]:
        """Read a journal without Spark until it is complete, and return its entries.

        RabbitMQ tells a dispatch once the relay is known to be empty, so one reader has to go on reading.
        """
        found: list[JournalEntry] = []
        position = ""
        with self.open(connection) as broker:

            def look() -> bool:
                nonlocal position
                while page := broker.read_journal(after=position):
                    found.extend(page)
                    position = page[-1].position
                return is_complete(found)

            wait_for(look, what=f"{what} in the journal of {connection}", seconds=PATIENCE_SECONDS, interval=0.2)
        return found

    def wait_for_dispatch(self, connection: str, message_ids: Sequence[str]) -> list[JournalEntry]:
        """Return the journal once it has the dispatches of these messages."""
        wanted = set(message_ids)

        def is_complete(entries: Sequence[JournalEntry]) -> bool:
            return wanted <= {entry.message_id for entry in entries if entry.change == "dispatched"}

        return self.read_until(connection, f"{len(wanted)} dispatches", is_complete)

    def wait_for_changes(self, connection: str, **counts: int) -> list[JournalEntry]:
        """Return the journal once it has so many entries of each change, of messages that the broker holds itself."""
        held: set[str] = set()

        def is_complete(entries: Sequence[JournalEntry]) -> bool:
            nonlocal held
            held = self.held_elsewhere() if connection == LEDGER else set()
            found = Counter(entry.change.value for entry in entries if entry.message_id not in held)
            return all(found[change] == count for change, count in counts.items())

        entries = self.read_until(connection, str(counts), is_complete)
        return [entry for entry in entries if entry.message_id not in held]

    def held_elsewhere(self) -> set[str]:
        """The ids in the ledger that are only copied from the journals of the others."""
        query = text("SELECT id FROM delay_scheduled_message WHERE held_by_broker = 1")
        with closing(Ledger(self.ledger_url)) as ledger, ledger.read() as connection:
            return set(connection.execute(query).scalars())


@contextmanager
def three_brokers(folder: Path) -> Iterator[ThreeBrokers]:
    """Start from nothing, and remove everything at the end."""
    with ExitStack() as stack:
        ledger_url = stack.enter_context(fresh_database())
        rabbit_url = stack.enter_context(rabbits.fresh_vhost())
        bootstrap = kafkas.require_kafka()
        stream = {"ladder": f"pipeline-{uuid4().hex[:8]}", "partitions": 2, "confirm_timeout": 20}
        connections: dict[str, Any] = {
            LEDGER: {"conn_type": "delay", "extra": {"ledger_url": ledger_url}},
            RABBIT: rabbits.connection_of(rabbit_url, tick=0.1, ledger_url=ledger_url),
            STREAM: kafkas.connection_of(bootstrap, **stream, ledger_url=ledger_url),
        }
        file = folder / "connections.json"
        file.write_text(json.dumps(connections))
        with closing(Ledger(ledger_url)) as ledger:
            ledger.migrate()
        scene = ThreeBrokers(file, ledger_url, rabbit_url, bootstrap)
        for name in ALL:
            scene.brokers[name] = stack.enter_context(scene.open(name))
        rabbit, kafka = scene.brokers[RABBIT], scene.brokers[STREAM]
        assert isinstance(rabbit, RabbitMQBroker)
        assert isinstance(kafka, KafkaBroker)
        rabbit.create_topology()
        kafka.create_topology()
        stack.callback(kafkas.delete_ladder, kafka)
        stack.callback(scene.stop_dispatcher)
        scene.start_dispatcher()
        yield scene
