"""A ladder of a test file's own, and the job that serves it on Spark, as a process that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from confluent_kafka import Message as KafkaMessage

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.spark.jobs import dispatch
from tests.kafkas import connection_of, delete_ladder, read_all
from tests.sparks import CONF
from tools.servers.component import wait_for
from tools.servers.spark import HOME, client_environment

CONN_ID = "streamed"
SECONDS = 240


@dataclass
class StreamedLadder:
    """A ladder and the checkpoint of its job."""

    bootstrap: str
    connector: str
    folder: Path
    master: str = "local[2]"
    partitions: int = 2
    ladder: str = field(default_factory=lambda: f"streamed-{uuid4().hex[:8]}")
    #: How the job connects, if not as the tests do.
    host: str = ""
    client: dict[str, object] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def config(self) -> KafkaConfig:
        return KafkaConfig.from_settings(self._settings, host=self.bootstrap)

    @property
    def checkpoint(self) -> str:
        return str(self.folder / "checkpoint")

    @property
    def log(self) -> str:
        return (self.folder / "job.log").read_text(errors="replace")

    def open(self) -> KafkaBroker:
        return KafkaBroker(self.config)

    def start(self) -> None:
        """Return once the job serves the ladder."""
        before = self.log.count("Serving the ladder") if (self.folder / "job.log").exists() else 0
        self.process = self._submit()
        wait_for(
            lambda: self._is_running() and self.log.count("Serving the ladder") > before,
            what="the job serves the ladder",
            seconds=SECONDS,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run the job to its end; return its exit code and what it wrote."""
        before = len(self.log)
        self.process = self._submit(*arguments)
        code = self.process.wait(SECONDS)
        self.process = None
        return code, self.log[before:]

    def kill(self) -> None:
        """Kill -9 driver and executors."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(SECONDS)
            self.process = None

    def stop(self) -> int:
        """End it as a cluster manager does."""
        assert self.process is not None
        process, self.process = self.process, None
        os.killpg(process.pid, signal.SIGTERM)
        return process.wait(SECONDS)

    def received(self, channel: str, n: int) -> list[KafkaMessage]:
        """Return the first ``n`` records of a channel; fail if the job has ended."""
        try:
            return read_all(self.bootstrap, channel, n, seconds=SECONDS)
        except TimeoutError as late:
            raise AssertionError(f"{late}; the job wrote: {self.log[-3000:]}") from late

    def _is_running(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log[-3000:]
        return True

    @property
    def _settings(self) -> dict[str, object]:
        return {"ladder": self.ladder, "partitions": self.partitions, "confirm_timeout": 60}

    def _submit(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [str(HOME / "bin/spark-submit"), "--master", self.master, "--jars", self.connector]
        for name, value in {**CONF, "spark.driver.memory": "1g", "spark.cores.max": "2"}.items():
            command += ["--conf", f"{name}={value}"]
        events = self.folder / "events"
        events.mkdir(exist_ok=True)
        command += ["--conf", "spark.eventLog.enabled=true", "--conf", f"spark.eventLog.dir=file://{events}"]
        command += [dispatch.__file__, "--connection", CONN_ID, "--checkpoint", self.checkpoint]
        command += ["--shards", "2", "--trigger", "0.5", *arguments]
        connection = json.dumps(connection_of(self.host or self.bootstrap, **self._settings, **self.client))
        env = {**os.environ, **client_environment(), f"AIRFLOW_CONN_{CONN_ID.upper()}": connection}
        with (self.folder / "job.log").open("ab") as log:
            return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


@contextmanager
def streamed_ladder(bootstrap: str, connector: str, folder: Path, **given: Any) -> Iterator[StreamedLadder]:
    """A new ladder, deleted in the end."""
    ladder = StreamedLadder(bootstrap, connector, folder, **given)
    with ladder.open() as broker:
        broker.create_topology()
        try:
            yield ladder
        finally:
            ladder.kill()
            delete_ladder(broker)


def ids_of(records: list[KafkaMessage]) -> list[str]:
    return [dict(record.headers())["delay-id"].decode() for record in records]


def serve_until_refused(broker: KafkaBroker) -> None:
    """Run a plain dispatcher, which is expected to raise."""
    dispatcher = broker.open_ladder_dispatcher()
    deadline = time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline:
            dispatcher.run_once()
    finally:
        dispatcher.close()
