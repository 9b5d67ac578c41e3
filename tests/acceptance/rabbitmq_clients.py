"""A publisher and a consumer as programs of their own, which log their messages.

For each message ``publish`` writes ``id deliver_at_ms published_ms confirmed_ms attempts``, ``consume`` writes
``id arrived_ms``.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TextIO

import pika
import pika.exceptions

from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.domain.clock import ceil_ms
from airflow_delay_provider.domain.exceptions import BrokerError
from airflow_delay_provider.domain.message import Message
from tests.rabbits import config_of

BATCH = 500
PREFETCH = 1000
#: How long a broker may be silent before the batch counts as unconfirmed.
CONFIRM_SECONDS = 20


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# -- publishing ----------------------------------------------------------------------------------------------------


def publish(args: argparse.Namespace) -> None:
    """Publish at an even pace; unconfirmed messages are published again, with the same id and due time."""
    source = random.Random(args.seed)
    settings = {"tick": args.tick, "management_url": args.management_url}
    config = config_of(args.url, **settings, confirm_timeout=CONFIRM_SECONDS)
    started = time.monotonic()
    with RabbitMQBroker(config) as broker, args.log.open("w") as log:
        for first in range(0, args.messages, BATCH):
            pause = started + args.seconds * first / args.messages - time.monotonic()
            time.sleep(max(0.0, pause))
            now = datetime.now(UTC)
            batch = [
                Message(
                    id=f"m{n}",
                    channel=args.channel,
                    payload=b"%d" % n,
                    deliver_at=now + timedelta(seconds=source.uniform(args.shortest, args.longest)),
                )
                for n in range(first, min(first + BATCH, args.messages))
            ]
            _publish_until_confirmed(broker, batch, log)


def _publish_until_confirmed(broker: RabbitMQBroker, batch: Sequence[Message], log: TextIO) -> None:
    attempts, published, waiting = 0, now_ms(), list(batch)
    while waiting:
        attempts += 1
        unconfirmed: set[str] = set()
        try:
            broker.schedule(waiting)
        except BrokerError as error:
            unconfirmed = set(error.unconfirmed)
            if not error.may_pass or not unconfirmed or not unconfirmed <= {message.id for message in waiting}:
                raise
        done = now_ms()
        for message in waiting:
            if message.id not in unconfirmed:
                print(message.id, ceil_ms(message.deliver_at), published, done, attempts, file=log)
        log.flush()
        waiting = [message for message in waiting if message.id in unconfirmed]


# -- consuming -----------------------------------------------------------------------------------------------------


def consume(args: argparse.Namespace) -> None:
    """Log each message and then acknowledge it, and reconnect as often as needed."""
    with args.log.open("w") as log:
        while True:
            with suppress(pika.exceptions.AMQPError, OSError):
                _consume_one_connection(args, log)
            time.sleep(0.2)


def _consume_one_connection(args: argparse.Namespace, log: TextIO) -> None:
    with _connected(args.url) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=PREFETCH)
        last_tag = 0

        def note(_channel: Any, method: Any, properties: pika.BasicProperties, _body: bytes) -> None:
            nonlocal last_tag
            print(properties.message_id, now_ms(), file=log)
            last_tag = method.delivery_tag

        channel.basic_consume(args.channel, note)
        while True:
            connection.process_data_events(time_limit=0.05)
            if last_tag:
                log.flush()
                channel.basic_ack(last_tag, multiple=True)
                last_tag = 0


@contextmanager
def _connected(url: str) -> Iterator[pika.BlockingConnection]:
    connection = pika.BlockingConnection(pika.URLParameters(f"{url}?heartbeat=10&socket_timeout=5"))
    try:
        yield connection
    finally:
        with suppress(pika.exceptions.AMQPError, OSError):
            connection.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["publish", "consume"])
    parser.add_argument("--url", required=True)
    parser.add_argument("--management-url", default="")
    parser.add_argument("--channel", required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--tick", type=float, default=1.0)
    parser.add_argument("--messages", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--shortest", type=float, default=1)
    parser.add_argument("--longest", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    publish(args) if args.role == "publish" else consume(args)


if __name__ == "__main__":
    main()
