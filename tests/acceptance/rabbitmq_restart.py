"""How late messages are after a RabbitMQ with default settings was killed, with no client connected.

`python -m tests.acceptance.rabbitmq_restart`: messages are scheduled, all clients end, the node is killed and starts
again. A plain consumer then notes when each message arrives. Counted is the time from the later of two moments, the
message's due time and the node being back.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pika

from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.domain.clock import ceil_ms
from airflow_delay_provider.domain.message import Message
from tests.acceptance.rabbitmq_clients import now_ms
from tests.acceptance.rabbitmq_positions import Positions, find_positions
from tests.rabbits import VERSIONS, config_of, declare_queue
from tools.servers.rabbitmq import RabbitMQ

CHANNEL = "restart"
BATCH = 1000
#: A little more than twice the time after which the broker dead-letters again.
PATIENCE_SECONDS = 400
#: After all are due and the broker has been back for so long, all messages that it still holds are late.
LOOK_AFTER_MS = 15_000


@dataclass(kw_only=True)
class Restarted:
    """The results of a run."""

    due: dict[str, int] = field(default_factory=dict)
    arrived: dict[str, list[int]] = field(default_factory=dict)
    down_ms: int = 0
    back_ms: int = 0
    #: The messages that the node held when all were due and it had been back for a while.
    positions: Positions = field(default_factory=Positions)

    def late_ms(self) -> list[int]:
        """How long after its due time, or after the broker was back, each message arrived."""
        return sorted(at[0] - max(self.due[name], self.back_ms) for name, at in self.arrived.items())

    def __str__(self) -> str:
        late = self.late_ms()
        shares = "  ".join(f"{name} {_at(late, share) / 1000:.1f} s" for name, share in _SHARES)
        early = sum(at[0] < self.due[name] for name, at in self.arrived.items())
        return "\n".join(
            (
                f"messages  {len(self.due)}, missing {len(set(self.due) - set(self.arrived))}, early {early},"
                f" twice {sum(len(at) - 1 for at in self.arrived.values())}",
                f"outage    {(self.back_ms - self.down_ms) / 1000:.1f} s",
                f"late      {shares}; {sum(ms > 15_000 for ms in late)} more than 15 s",
                f"held when all were due\n{self.positions}",
            )
        )


_SHARES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The settings of a run."""

    messages: int = 20_000
    #: Seconds between the last publish and the kill, and between the kill and the start.
    after: float = 10
    down: float = 5
    seed: int = 0


def restart(work: Restart, node: RabbitMQ) -> Restarted:
    """Run the measurement on a running node."""
    result = Restarted()
    declare_queue(node.url, CHANNEL, **{"x-queue-type": "quorum"})
    with RabbitMQBroker(config_of(node.url)) as broker:
        _schedule(work, broker, result)
    time.sleep(work.after)
    result.down_ms = now_ms()
    node.kill()
    time.sleep(work.down)
    node.start_again()
    result.back_ms = now_ms()
    _consume(work, node, result)
    return result


def _schedule(work: Restart, broker: RabbitMQBroker, result: Restarted) -> None:
    source = random.Random(work.seed)
    broker.create_topology([CHANNEL])
    for first in range(0, work.messages, BATCH):
        now = datetime.now(UTC)
        batch = [
            Message(
                id=f"m{n}",
                channel=CHANNEL,
                payload=b"x" * 256,
                deliver_at=now + timedelta(seconds=source.uniform(1, 60)),
            )
            for n in range(first, min(first + BATCH, work.messages))
        ]
        broker.schedule(batch)
        result.due |= {message.id: ceil_ms(message.deliver_at) for message in batch}


def _consume(work: Restart, node: RabbitMQ, result: Restarted) -> None:
    """Record arrivals until all have arrived or time is up, and once the messages that the node holds meanwhile."""

    def note(channel: Any, method: Any, properties: pika.BasicProperties, _body: bytes) -> None:
        result.arrived.setdefault(str(properties.message_id), []).append(now_ms())
        channel.basic_ack(method.delivery_tag)

    with pika.BlockingConnection(pika.URLParameters(f"{node.url}?heartbeat=0")) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1000)
        channel.basic_consume(CHANNEL, note)
        deadline, has_looked = time.monotonic() + PATIENCE_SECONDS, False
        while time.monotonic() < deadline and len(result.arrived) < work.messages:
            connection.process_data_events(time_limit=1)
            if not has_looked and now_ms() > max(result.back_ms + LOOK_AFTER_MS, max(result.due.values())):
                result.positions, has_looked = find_positions(node), True


def _at(ascending: list[int], share: float) -> int:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))] if ascending else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--version", choices=list(VERSIONS), default="rabbitmq3")
    parser.add_argument("--after", type=float, default=10, help="seconds between the last publish and the kill")
    parser.add_argument("--down", type=float, default=5, help="seconds between the kill and the start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--advanced", default="", help="the broker's advanced.config, as Erlang terms")
    args = parser.parse_args()
    node = VERSIONS[args.version](advanced=args.advanced)
    with tempfile.TemporaryDirectory(prefix="delay-restart-") as folder:
        node.start(Path(folder))
        try:
            print(node.control("version").strip())
            work = Restart(messages=args.messages, after=args.after, down=args.down, seed=args.seed)
            print(restart(work, node))
        finally:
            node.stop()


if __name__ == "__main__":
    main()
