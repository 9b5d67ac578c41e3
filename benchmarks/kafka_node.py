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
from confluent_kafka.admin import AdminClient, NewTopic

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from tests.servers.component import wait_for
from tests.servers.kafka import Kafka

#: Of all topics: the default of the provider.
PARTITIONS = 4
PAYLOAD_BYTES = 100
#: What the ladder is called in the results that has the default radix, and where plain Kafka stands beside it.
STORE = "radix 4"
SECONDS = 30


class Node:
    """A broker on this machine."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        port = int(bootstrap.split(",")[0].rpartition(":")[2])
        pids = {c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port}
        if None in pids or len(pids) != 1:
            raise RuntimeError(f"no Kafka of this user listens on port {port} of this machine: unset {Kafka.variable}")
        self._process = psutil.Process(pids.pop())
        self._admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})

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

    @contextmanager
    def topics(self, count: int) -> Iterator[list[str]]:
        """Give new topics for as long as they are needed."""
        names = [f"bench-{uuid4().hex}" for _ in range(count)]
        for created in self._admin.create_topics([NewTopic(name, PARTITIONS) for name in names]).values():
            created.result(SECONDS)
        wait_for(lambda: all(map(self._is_usable, names)), what="topics can be used", seconds=SECONDS, interval=0.02)
        try:
            yield names
        finally:
            for deleted in self._admin.delete_topics(names).values():
                deleted.result(SECONDS)

    def _is_usable(self, topic: str) -> bool:
        partitions = self._admin.list_topics(topic, timeout=SECONDS).topics[topic].partitions
        return len(partitions) == PARTITIONS and all(each.leader >= 0 for each in partitions.values())

    @contextmanager
    def ladder(self, radix: int = 4) -> Iterator[dict[str, Any]]:
        """Give a ladder for as long as it is needed, as the settings of a connection."""
        name = f"bench-{uuid4().hex[:8]}"
        settings = {"ladder": name, "radix": radix, "partitions": PARTITIONS, "host": self.bootstrap}
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
