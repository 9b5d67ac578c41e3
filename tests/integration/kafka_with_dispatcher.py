"""A ladder of a test file's own in Kafka, behind the connection ``stream``, and a real dispatcher that serves it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch
from uuid import uuid4

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.hooks.delay import open_destination
from tests.kafkas import connection_of, delete_ladder, fresh_topic, require_kafka
from tools.servers.component import wait_for

CONN_ID = "stream"
PATIENCE_SECONDS = 90


@dataclass(frozen=True)
class Stream:
    """What tests need to know of the ladder."""

    bootstrap: str
    settings: dict[str, Any]
    ledger_url: str

    @property
    def prefix(self) -> str:
        """What the names of its topics begin with."""
        return f"delay.v1.{self.settings['ladder']}"

    def open(self) -> KafkaBroker:
        return KafkaBroker(KafkaConfig.from_settings(self.settings, host=self.bootstrap))

    def topic(self) -> str:
        return fresh_topic(self.bootstrap)

    def received(self, channel: str, n: int) -> list[Message]:
        """Take ``n`` messages, and see that there are no more."""
        found: list[Message] = []
        with self.open() as broker:

            def all_there() -> bool:
                deliveries = broker.receive(channel, limit=1000)
                broker.ack(deliveries)
                now = broker.clock.now()
                assert [each.message.id for each in deliveries if each.message.deliver_at > now] == []
                found.extend(delivery.message for delivery in deliveries)
                return len(found) >= n

            wait_for(all_there, what=f"{n} messages in {channel}", seconds=PATIENCE_SECONDS, interval=0.05)
        assert len(found) == n
        return found


@contextmanager
def stream_with_dispatcher(ledger_url: str) -> Iterator[Stream]:
    """The ladder, served and copied into a ledger, and deleted in the end."""
    bootstrap = require_kafka()
    settings = {"ladder": f"surface-{uuid4().hex[:8]}", "partitions": 2, "confirm_timeout": 20}
    variables = {f"AIRFLOW_CONN_{CONN_ID.upper()}": json.dumps(connection_of(bootstrap, **settings))}
    config = DispatcherConfig(kafka=(CONN_ID,), index=(CONN_ID,), health_port=None)
    with patch.dict("os.environ", variables):
        dispatcher = Dispatcher(Ledger(ledger_url), open_broker=open_destination, config=config)
        stream = Stream(bootstrap, settings, ledger_url)
        with stream.open() as broker:
            broker.create_topology()
            dispatcher.start()
            try:
                yield stream
                loops = dispatcher.health()["loops"]
                assert [name for name, loop in loops.items() if not loop["well"]] == []
            finally:
                assert dispatcher.stop()
                delete_ladder(broker)
