"""Sensors wait for messages that never arrive, and do no harm: `python -m tests.acceptance.waiting_sensors_soak`.

Sensors whose filters match nothing wait on a quorum queue with default settings of RabbitMQ 4, in a process that is
killed (-9) or shut down and started again. Meanwhile another program consumes a few messages now and then and puts new
ones in. At the end each message must be in the queue or with that program, and its delivery count must not exceed the
starts of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from uuid import uuid4

import pika

from tests.rabbits import connection_of
from tools.servers.component import wait_for
from tools.servers.rabbitmq import RabbitMQ, RabbitMQ4

QUEUE = "waited-on"
#: How long the other consumer waits for a message.
PATIENCE_SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class Soak:
    """The settings of a run."""

    seconds: float = 600
    #: More than the other consumer takes, so that the queue is never empty.
    messages: int = 100
    sensors: int = 20
    #: How long a triggerer lives once it consumes.
    life: tuple[float, float] = (20, 60)
    #: What another consumer asks for at once, and how often.
    asked: int = 3
    every: float = 30
    seed: int = 0
    tell: Callable[[str], None] = print


@dataclass(kw_only=True)
class Result:
    """The results of a run."""

    published: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    left: dict[str, int] = field(default_factory=dict)
    acquired: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    starts: int = 0
    kills: int = 0
    #: Seconds in which sensors waited.
    waited: float = 0

    @property
    def lost(self) -> set[str]:
        return self.published - self.taken - set(self.left)

    @property
    def most_counted(self) -> int:
        return max(self.left.values(), default=0)

    def __str__(self) -> str:
        return (
            f"{len(self.published)} published, {len(self.taken)} taken by the other consumer, {len(self.left)} left,"
            f" {len(self.lost)} lost; sensors waited for {self.waited:.0f} s; {self.starts} triggerers started,"
            f" {self.kills} of them killed (-9); delivery count at most {self.most_counted}; taken and given back up to"
            f" {max(self.acquired, default=0)} times;"
            f" the other consumer waited {statistics.median(self.waits or [0]):.1f} s (median),"
            f" {max(self.waits, default=0):.1f} s (longest) for what it asked for"
        )


class OtherProgram:
    """A raw client."""

    def __init__(self, url: str, result: Result) -> None:
        self._connection = pika.BlockingConnection(pika.URLParameters(f"{url}?heartbeat=0"))
        self._channel = self._connection.channel()
        self._channel.confirm_delivery()
        self._channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        self._result = result

    def publish(self, n: int) -> None:
        for _ in range(n):
            message_id = uuid4().hex
            properties = pika.BasicProperties(message_id=message_id, delivery_mode=2)
            self._channel.basic_publish("", QUEUE, b"no sensor waits for this", properties)
            self._result.published.add(message_id)

    def is_beside_a_consumer(self) -> bool:
        return bool(self._channel.queue_declare(QUEUE, passive=True).method.consumer_count)

    def ask_for(self, n: int) -> None:
        """Consume ``n`` messages and note how long it took."""
        began = time.monotonic()
        self._channel.basic_qos(prefetch_count=n)
        pushed = self._channel.consume(QUEUE, inactivity_timeout=PATIENCE_SECONDS)
        for method, properties, _ in islice(pushed, n):
            if method is None:
                raise TimeoutError(f"the other consumer got nothing for {PATIENCE_SECONDS} s")
            self._result.taken.add(properties.message_id)
            self._channel.basic_ack(method.delivery_tag)
        self._channel.cancel()
        self._result.waits.append(time.monotonic() - began)

    def take_all(self) -> None:
        """Take the remaining messages, with the counts of the queue."""
        deadline = time.monotonic() + 30
        while len(self._result.left) < len(self._result.published - self._result.taken) and time.monotonic() < deadline:
            method, properties, _ = self._channel.basic_get(QUEUE)
            if method is None:
                time.sleep(0.1)
                continue
            headers = properties.headers or {}
            self._result.left[properties.message_id] = int(headers.get("x-delivery-count", 0))
            self._result.acquired.append(int(headers.get("x-acquired-count", 0)))
        self._connection.close()


def run(soak: Soak, node: RabbitMQ) -> Result:
    """Wait for the given time and return the observations."""
    chance, result = random.Random(soak.seed), Result()
    other = OtherProgram(node.url, result)
    other.publish(soak.messages)
    env = os.environ | {"AIRFLOW_CONN_RABBIT": json.dumps(connection_of(node.url))}
    command = [sys.executable, "-m", "tests.acceptance.waiting_triggers", QUEUE, str(soak.sensors)]
    end, next_question = time.monotonic() + soak.seconds, time.monotonic() + soak.every
    while time.monotonic() < end:
        triggerer = subprocess.Popen(command, env=env)
        result.starts += 1
        wait_for(other.is_beside_a_consumer, what="the triggerer consumes", seconds=120)
        began = time.monotonic()
        ends_at = min(end, began + chance.uniform(*soak.life))
        while time.monotonic() < ends_at and triggerer.poll() is None:
            if time.monotonic() >= next_question:
                other.ask_for(soak.asked)
                other.publish(soak.asked)
                next_question = time.monotonic() + soak.every
            time.sleep(0.2)
        if triggerer.poll() is not None:
            raise RuntimeError(f"the triggerer ended by itself with {triggerer.returncode}")
        result.waited += time.monotonic() - began
        is_kill = chance.random() < 0.5
        result.kills += is_kill
        triggerer.send_signal(signal.SIGKILL if is_kill else signal.SIGTERM)
        triggerer.wait(30)
        how = "killed" if is_kill else "shut down"
        soak.tell(f"{max(0, end - time.monotonic()):.0f} s to go; triggerer {result.starts} was {how}")
    other.take_all()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--messages", type=int, default=100)
    parser.add_argument("--sensors", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    soak = Soak(seconds=args.seconds, messages=args.messages, sensors=args.sensors, seed=args.seed)
    node = RabbitMQ4()
    with tempfile.TemporaryDirectory() as folder:
        node.start(Path(folder))
        try:
            result = run(soak, node)
        finally:
            node.stop()
    print(result)
    return 1 if result.lost or result.most_counted > result.starts else 0


if __name__ == "__main__":
    sys.exit(main())
