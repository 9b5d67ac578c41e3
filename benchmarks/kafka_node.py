"""The Kafka that is measured, and processes with interpreters of their own: dispatchers and consumers."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from airflow_delay_provider.brokers.kafka import header_protocol as protocol
from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.dispatch.loop import KafkaLadderDispatcher
from airflow_delay_provider.brokers.kafka.reader import take
from benchmarks.measurement import MismatchError, ServerProcess
from tools.servers.component import wait_for
from tools.servers.kafka import Kafka

#: Of all topics: the default of the provider.
PARTITIONS = 4
PAYLOAD_BYTES = 100
#: The name of the ladder with the default radix in the results, where plain Kafka is listed too.
STORE = "radix 4"
SECONDS = 30


class Node(ServerProcess):
    """A broker on this machine."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__("Kafka", int(bootstrap.split(",")[0].rpartition(":")[2]), Kafka.variable)
        self.bootstrap = bootstrap
        self._admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})

    def version(self) -> str:
        """Return the version of the jars that it was started with."""
        found = re.search(r"kafka-(\d+(\.\d+)+)", " ".join(self.process.cmdline()))
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


#: How long a process may be silent.
SILENCE_SECONDS = 180.0
STOP = "stop"


class Worker:
    """A process that exchanges messages with this one."""

    def __init__(self, name: str, process: Any, pipe: Connection) -> None:
        self._name = name
        self._process = process
        self._pipe = pipe

    def tell(self, what: Any) -> None:
        """Send something."""
        self._pipe.send(what)

    def hear(self, seconds: float = SILENCE_SECONDS) -> Any:
        """Return its next message."""
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv()
        except EOFError:
            self._process.join(10)
            raise MismatchError(f"{self._name} ended with {self._process.exitcode}; its error is above") from None
        raise MismatchError(f"{self._name} said nothing for {seconds:g} s")

    def ask(self, what: Any) -> Any:
        """Send something and return the answer."""
        self.tell(what)
        return self.hear()


@contextmanager
def started(target: Callable[..., None], *arguments: Any) -> Iterator[Worker]:
    """Run ``target(pipe, *arguments)`` in a new process for as long as it is needed."""
    context = get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=target, args=(its, *arguments), daemon=True)
    process.start()
    its.close()
    try:
        yield Worker(target.__name__, process, ours)
    finally:
        ours.close()
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join()


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The resources that a process has used."""

    cpu_seconds: float
    peak_rss_mb: float

    @classmethod
    def of_this_process(cls) -> Usage:
        """Return the current usage."""
        # Not ru_maxrss: that begins with what the parent had.
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return cls(cpu_seconds=time.process_time(), peak_rss_mb=int(peak[1]) / 1024 if peak else math.nan)


def run_dispatcher(pipe: Connection, settings: Mapping[str, Any]) -> None:
    """A dispatcher in real time: reports when it serves partitions, and its usage on request and when it stops."""
    with KafkaBroker(config_of(settings)) as broker:
        dispatcher = broker.open_ladder_dispatcher()
        assert isinstance(dispatcher, KafkaLadderDispatcher)
        while not dispatcher._assignment.partitions:
            dispatcher.run_once()
        pipe.send(time.monotonic())
        while True:
            dispatcher.run_once()
            if pipe.poll():
                try:
                    heard = pipe.recv()
                except EOFError:
                    heard = STOP
                if heard == STOP:
                    break
                pipe.send(Usage.of_this_process())
        dispatcher.close()
    try:
        pipe.send(Usage.of_this_process())
    except BrokenPipeError:
        return


READ_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A message in its channel; milliseconds since the epoch."""

    message_id: bytes
    deliver_at: int
    #: When the dispatcher wrote it.
    written_at: int
    #: When the consumer got it.
    seen_at: float


def read_all(bootstrap: str, topic: str, n: int) -> list[Message]:
    """Return the first ``n`` records of a topic."""
    return [record for records, _ in _read(bootstrap, topic, n, READ_SECONDS) for record in records]


def watch(pipe: Connection, bootstrap: str, topic: str, n: int, seconds: float) -> None:
    """Consume messages in a process of its own; report when that begins, and then the arrivals."""
    batches = list(_read(bootstrap, topic, n, seconds, started=pipe))
    pipe.send([_seen(record, at) for records, at in batches for record in records])


def _read(
    bootstrap: str, topic: str, n: int, seconds: float, *, started: Connection | None = None
) -> Iterator[tuple[list[Message], float]]:
    settings = {"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False, "log_level": 0}
    deadline, found = time.monotonic() + seconds, 0
    with Consumer({**settings, "isolation.level": "read_committed"}) as consumer:
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(PARTITIONS)])
        consumer.poll(0.1)
        if started is not None:
            started.send("begin")
        while found < n:
            records, now = take(consumer, 0.5), time.time() * 1000
            for record in records:
                if record.error() is not None:
                    raise KafkaException(record.error())
            found += len(records)
            yield records, now
            if time.monotonic() > deadline:
                raise MismatchError(f"topic {topic}: found {found} of {n} records after {seconds:g} s")


def _seen(record: Message, at: float) -> Seen:
    headers = dict(record.headers() or ())
    return Seen(headers[protocol.ID], int(headers[protocol.DELIVER_AT]), record.timestamp()[1], at)
