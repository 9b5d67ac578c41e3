"""The dispatcher on Spark as a process that can be killed, and a consumer that counts what arrives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition

from airflow_delay_provider.brokers.kafka.reader import take
from airflow_delay_provider.spark.jobs import dispatch
from benchmarks.kafka_node import PARTITIONS, Seen, _seen
from benchmarks.measurement import MismatchError
from tools.servers.component import wait_for
from tools.servers.spark import HOME, HOST, SparkCluster, client_environment, find_kafka_connector

CONN_ID = "streaming_bench"
START_SECONDS = 240
#: How long the consumer waits for duplicates after the last message.
QUIET_SECONDS = 15.0


@dataclass
class Job:
    """One ladder's job, on so many executors with one core each."""

    settings: Mapping[str, Any]
    cluster: SparkCluster
    executors: int
    folder: Path
    shards: int
    trigger: float
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> float:
        """Return how long it took until the job served the ladder."""
        begin, log = time.monotonic(), self.folder / f"job-{time.monotonic_ns()}.log"
        with log.open("wb") as written:
            self._process = subprocess.Popen(
                self._command(), env=self._environment(), stdout=written, stderr=written, start_new_session=True
            )
        wait_for(lambda: self._serves(log), what="the job serves", seconds=START_SECONDS)
        return time.monotonic() - begin

    def kill(self) -> None:
        """Kill -9 the driver; the cluster ends its executors."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _serves(self, log: Path) -> bool:
        text = log.read_text(errors="replace")
        if self._process is None or self._process.poll() is not None:
            raise MismatchError(f"the job has ended:\n{text[-3000:]}")
        return "Serving the ladder" in text

    def _command(self) -> list[str]:
        conf = {
            "spark.ui.enabled": "false",
            "spark.driver.host": HOST,
            "spark.driver.memory": "1g",
            "spark.executor.memory": "1g",
            "spark.executor.cores": "1",
            "spark.cores.max": str(self.executors),
        }
        jars = ",".join(map(str, find_kafka_connector()))
        command = [str(HOME / "bin/spark-submit"), "--master", self.cluster.url, "--jars", jars]
        for name, value in conf.items():
            command += ["--conf", f"{name}={value}"]
        command += [dispatch.__file__, "--connection", CONN_ID, "--checkpoint", str(self.folder / "checkpoint")]
        return [*command, "--shards", str(self.shards), "--trigger", str(self.trigger)]

    def _environment(self) -> dict[str, str]:
        extra = {name: value for name, value in self.settings.items() if name != "host"}
        connection = {"conn_type": "delay_kafka", "host": self.settings["host"], "extra": extra}
        name = f"AIRFLOW_CONN_{CONN_ID.upper()}"
        return {**os.environ, **client_environment(), name: json.dumps(connection)}


@contextmanager
def serving(job: Job) -> Iterator[float]:
    """Run the job; yields how long it took to start."""
    try:
        yield job.start()
    finally:
        job.kill()


def collect(pipe: Connection, bootstrap: str, topic: str, n: int, seconds: float) -> None:
    """Read committed records until ``n`` different messages have come, and a while longer; send all of them."""
    settings = {"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False, "log_level": 0}
    deadline, found, ids = time.monotonic() + seconds, list[Seen](), set[bytes]()
    with Consumer({**settings, "isolation.level": "read_committed"}) as consumer:
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(PARTITIONS)])
        consumer.poll(0.1)
        pipe.send("begin")
        is_complete = False
        while time.monotonic() < deadline:
            for record in take(consumer, 0.5):
                if record.error() is not None:
                    raise KafkaException(record.error())
                found.append(_seen(record, time.time() * 1000))
                ids.add(found[-1].message_id)
            if not is_complete and len(ids) >= n:
                is_complete, deadline = True, time.monotonic() + QUIET_SECONDS
    pipe.send(found)
