"""Where the pipeline schedules: Kafka, a ledger in PostgreSQL, RabbitMQ; each is counted after every run."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from pika import BasicProperties

from airflow_delay_provider.brokers.kafka import header_protocol as protocol
from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.rabbitmq import admin
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.brokers.rabbitmq.connection import AmqpConnection
from airflow_delay_provider.brokers.rabbitmq.publish import Publisher
from airflow_delay_provider.domain.clock import ceil_ms
from benchmarks.bare import open_bare, rows_of
from benchmarks.databases import URL_VARIABLE as POSTGRES_VARIABLE
from benchmarks.databases import Postgres
from benchmarks.kafka_node import Node as KafkaNode
from benchmarks.kafka_node import config_of as kafka_config_of
from benchmarks.kafka_schedule import CONFIRMED
from benchmarks.measurement import expect
from benchmarks.pipeline_rows import messages_of, read_batches
from tests.rabbits import URL_VARIABLE as RABBITMQ_VARIABLE
from tests.rabbits import config_of as rabbitmq_config_of
from tools.servers.kafka import Kafka

_CHANNEL = "bench"
_SECONDS = 60


class Place(ABC):
    """A store with nothing in it."""

    channel = _CHANNEL

    @property
    @abstractmethod
    def connection(self) -> dict[str, Any]:
        """Its Airflow connection, in the form of its JSON."""

    @abstractmethod
    def schedule_bare(self, parquet: Path) -> float:
        """Write the rows with the client library alone; return the seconds."""

    @abstractmethod
    def count(self) -> int:
        """Return how many messages wait."""


@dataclass(frozen=True)
class Store:
    """A broker on this machine."""

    name: str
    #: What the bare loop is.
    bare: str
    #: Give a place for one run.
    fresh: Callable[[], AbstractContextManager[Place]]
    #: Whether Spark's own sink can write there.
    has_sink: bool = False


def open_stores() -> AbstractContextManager[list[Store]]:
    """Open those that the environment names."""
    return _opened()


@contextmanager
def _opened() -> Iterator[list[Store]]:
    with ExitStack() as stack:
        stores = []
        if bootstrap := os.environ.get(Kafka.variable):
            place = stack.enter_context(_kafka(bootstrap))
            stores.append(Store("kafka", "bare produce with headers", place.emptied, has_sink=True))
        if url := os.environ.get(POSTGRES_VARIABLE):
            stores.append(Store("postgresql", "bare executemany", partial(_fresh_ledger, Postgres(url))))
        if url := os.environ.get(RABBITMQ_VARIABLE):
            queues = stack.enter_context(_rabbitmq(url))
            stores.append(Store("rabbitmq", "bare publish with confirms", queues.emptied))
        yield stores


# -- Kafka ---------------------------------------------------------------------------------------------------------


@contextmanager
def _kafka(bootstrap: str) -> Iterator[_KafkaPlace]:
    node = KafkaNode(bootstrap)
    with node.ladder() as settings, node.topics(1) as (topic,), KafkaBroker(kafka_config_of(settings)) as broker:
        yield _KafkaPlace(bootstrap, settings, broker.topology.inbox, topic)


class _KafkaPlace(Place):
    def __init__(self, bootstrap: str, settings: dict[str, Any], inbox: str, topic: str) -> None:
        self.channel = topic
        self._bootstrap = bootstrap
        self._settings = {name: value for name, value in settings.items() if name != "host"}
        self._inbox = inbox
        self._admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        self._partitions = [TopicPartition(inbox, number) for number in range(settings["partitions"])]
        self._begin = 0

    @contextmanager
    def emptied(self) -> Iterator[Place]:
        """Delete what was written, so that a disk of any size will do."""
        self._begin = self._end()
        yield self
        whole = [TopicPartition(each.topic, each.partition, -1) for each in self._partitions]
        for deleted in self._admin.delete_records(whole).values():
            deleted.result(_SECONDS)

    @property
    def connection(self) -> dict[str, Any]:
        return {"conn_type": "delay_kafka", "host": self._bootstrap, "extra": self._settings}

    def schedule_bare(self, parquet: Path) -> float:
        seconds, confirmed, channel = 0.0, 0, self.channel.encode()

        def note(error: Any, _record: Any) -> None:
            nonlocal confirmed
            if error is not None:
                raise KafkaException(error)
            confirmed += 1

        producer, rows = Producer({"bootstrap.servers": self._bootstrap, **CONFIRMED}), 0
        for batch in read_batches(parquet):
            items = [(row["id"].encode(), row["payload"], b"%d" % ceil_ms(row["deliver_at"])) for row in batch]
            rows, begin = rows + len(items), time.perf_counter()
            for message_id, payload, due in items:
                headers = [(protocol.ID, message_id), (protocol.CHANNEL, channel), (protocol.DELIVER_AT, due)]
                while True:
                    try:
                        producer.produce(self._inbox, payload, headers=headers, on_delivery=note)
                        break
                    except BufferError:
                        producer.poll(0.05)
            producer.poll(0)
            seconds += time.perf_counter() - begin
        begin = time.perf_counter()
        producer.flush(_SECONDS)
        seconds += time.perf_counter() - begin
        expect("delivery reports", confirmed, rows)
        return seconds

    def count(self) -> int:
        return self._end() - self._begin

    def _end(self) -> int:
        asked = self._admin.list_offsets({each: OffsetSpec.latest() for each in self._partitions})
        return sum(answer.result(_SECONDS).offset for answer in asked.values())


# -- PostgreSQL ----------------------------------------------------------------------------------------------------


@contextmanager
def _fresh_ledger(database: Postgres) -> Iterator[Place]:
    with database.fresh() as url:
        yield _LedgerPlace(database, url)


class _LedgerPlace(Place):
    def __init__(self, database: Postgres, url: str) -> None:
        self._database = database
        self._url = url

    @property
    def connection(self) -> dict[str, Any]:
        return {"conn_type": "delay", "extra": {"ledger_url": self._url}}

    def schedule_bare(self, parquet: Path) -> float:
        seconds = 0.0
        with closing(open_bare(self._database.name, self._database.connect(self._url))) as bare:
            for batch in read_batches(parquet):
                columns, rows = rows_of(messages_of(batch, self.channel), now_ms=0)
                begin = time.perf_counter()
                bare.insert(columns, rows)
                seconds += time.perf_counter() - begin
        return seconds

    def count(self) -> int:
        with closing(open_bare(self._database.name, self._database.connect(self._url))) as bare:
            return bare.count_messages()


# -- RabbitMQ ------------------------------------------------------------------------------------------------------


@contextmanager
def _rabbitmq(url: str) -> Iterator[_RabbitMQPlace]:
    config = rabbitmq_config_of(url)
    with RabbitMQBroker(config) as broker:
        place = _RabbitMQPlace(url, [rung.name for rung in broker.topology.rungs()])
        with closing(AmqpConnection.open(config)) as connection:
            place.connect(connection)
            admin.declare_queue(connection, place.channel)
            broker.create_topology([place.channel])
            try:
                yield place
            finally:
                with connection.channel() as channel:
                    channel.call("queue_delete", queue=place.channel)


class _RabbitMQPlace(Place):
    def __init__(self, url: str, rungs: Iterable[str]) -> None:
        self.channel = f"bench-{uuid4().hex[:8]}"
        self._url = url
        self._queues = [*rungs, self.channel]

    def connect(self, connection: AmqpConnection) -> None:
        """Use a connection for what is not measured."""
        self._connection = connection

    @contextmanager
    def emptied(self) -> Iterator[Place]:
        """Remove what others have left."""
        self.count()
        yield self

    @property
    def connection(self) -> dict[str, Any]:
        config = rabbitmq_config_of(self._url)
        return {
            "conn_type": "rabbitmq",
            "host": config.hosts[0][0],
            "port": config.hosts[0][1],
            "schema": config.vhost,
            "login": config.login,
            "password": config.password,
        }

    def schedule_bare(self, parquet: Path) -> float:
        seconds, properties = 0.0, BasicProperties(delivery_mode=2)
        with closing(AmqpConnection.open(rabbitmq_config_of(self._url))) as connection:
            publisher = Publisher(connection)
            for batch in read_batches(parquet):
                messages = messages_of(batch, self.channel)
                begin = time.perf_counter()
                publisher.publish(messages, lambda _message: ("", self.channel, properties))
                seconds += time.perf_counter() - begin
        return seconds

    def count(self) -> int:
        """Count by removing them."""
        with self._connection.channel() as channel:
            purged = [channel.call("queue_purge", queue=queue).method.message_count for queue in self._queues]
        return sum(purged)
