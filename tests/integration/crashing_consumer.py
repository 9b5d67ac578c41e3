"""A consumer that puts a message back and dies by SIGKILL when that is confirmed, before it acknowledges."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from unittest.mock import patch

from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.brokers.rabbitmq.receive import Receiver
from tests.integration.rabbitmq_scene import wait_for
from tests.rabbits import config_of


def main(url: str, channel: str) -> None:
    broker = RabbitMQBroker(config_of(url, tick=0.1))
    [delivery] = wait_for(lambda: broker.receive(channel), what="a message")
    with patch.object(Receiver, "ack", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
        broker.requeue(delivery, timedelta(seconds=0.3))


if __name__ == "__main__":
    main(*sys.argv[1:])
