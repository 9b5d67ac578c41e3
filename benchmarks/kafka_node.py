"""The Kafka that is measured, the CPU time it uses, and ladders and topics of a benchmark's own."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
from confluent_kafka.admin import AdminClient

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from tests.kafkas import fresh_topic
from tests.servers.kafka import Kafka

#: Of all topics: the default of the provider.
PARTITIONS = 4


class Node:
    """A broker on this machine."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        port = int(bootstrap.split(",")[0].rpartition(":")[2])
        pids = {c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port}
        if None in pids or len(pids) != 1:
            raise RuntimeError(
                f"no Kafka of this user listens on port {port} of this machine: unset {Kafka.variable}"
            )
        self._process = psutil.Process(pids.pop())

    @property
    def cpu_seconds(self) -> float:
        """CPU time that the broker has used since it began."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def idle_share(self, seconds: float) -> float:
        """Return how much of one core the broker uses while nobody asks for anything new."""
        before = self.cpu_seconds
        time.sleep(seconds)
        return (self.cpu_seconds - before) / seconds

    def version(self) -> str:
        """Return the version of the jars that it was started with."""
        found = re.search(r"kafka-(\d+(\.\d+)+)", " ".join(self._process.cmdline()))
        return found[1] if found else "unknown"

    def topic(self, **config: Any) -> str:
        """Return a new topic."""
        return fresh_topic(self.bootstrap, PARTITIONS, **config)

    @contextmanager
    def topics(self, count: int) -> Iterator[list[str]]:
        """Give new topics for as long as they are needed."""
        names = [self.topic() for _ in range(count)]
        try:
            yield names
        finally:
            with AdminClient({"bootstrap.servers": self.bootstrap}) as admin:
                for deleted in admin.delete_topics(names).values():
                    deleted.result(30)

    def settings(self, radix: int = 4) -> dict[str, Any]:
        """Return the settings of a connection to a ladder that does not exist yet."""
        return {"ladder": f"bench-{uuid4().hex[:8]}", "radix": radix, "partitions": PARTITIONS, "host": self.bootstrap}

    @contextmanager
    def ladder(self, radix: int = 4) -> Iterator[dict[str, Any]]:
        """Give a ladder for as long as it is needed, as the settings of a connection."""
        settings = self.settings(radix)
        with KafkaBroker(config_of(settings)) as broker:
            broker.create_topology()
            try:
                yield settings
            finally:
                broker.delete_topology(even_if_messages_wait=True)


def config_of(settings: Mapping[str, Any]) -> KafkaConfig:
    """Return the configuration of a connection; its settings can be sent to another process, this cannot."""
    return KafkaConfig.from_settings(
        {name: value for name, value in settings.items() if name != "host"}, host=settings["host"]
    )


@contextmanager
def open_node(scratch: Path) -> Iterator[Node]:
    """Use the broker given by the environment, or a private one."""
    with ExitStack() as stack:
        bootstrap = os.environ.get(Kafka.variable)
        if not bootstrap:
            server = Kafka()
            stack.callback(server.stop)
            server.start(scratch)
            bootstrap = server.bootstrap
        yield Node(bootstrap)
