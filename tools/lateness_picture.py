"""``python -m tools.lateness_picture``: write the picture of the lateness report into docs/images.

It sends messages over a ledger, RabbitMQ and Kafka for some minutes, stops the dispatcher for a moment in between, runs
the job, and takes a picture of its page. It needs RabbitMQ 4, which keeps the second of each dispatch. The servers are
those of the environment::

    python -m tools.servers --run-dir .run/picture postgres rabbitmq4 kafka -- python -m tools.lateness_picture
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message
from tools.screenshots import IMAGES, shrink
from tools.servers.chromium import Chromium, find_chromium, launch
from tools.servers.spark import client_environment

CHANNELS = ("invoices", "orders", "reminders")
DELAY_SECONDS = (1.0, 20.0)
#: Messages of each connection a second, and the share of them that is cancelled where the broker can.
RATE = 20
CANCELLED = 0.02
#: When the dispatcher is stopped, as a share of the time, and for how long.
OUTAGE, OUTAGE_SECONDS = 0.55, 10.0
WIDTH = 1360


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0, help="how long messages are sent; default: 10")
    options.add_argument("--picture", type=Path, default=IMAGES / "lateness-report.png")
    options.add_argument("--folder", type=Path, help="keep entries and report here; default: a temporary folder")
    given = options.parse_args(argv)
    program = os.environ.get(Chromium.variable) or find_chromium(instead=f"or set {Chromium.variable}")
    with TemporaryDirectory(prefix="delay-lateness-") as temporary:
        folder = (given.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        send_and_report(folder, minutes=given.minutes)
        with sync_playwright() as playwright, launch(playwright, program) as browser:
            page = browser.new_page(viewport={"width": WIDTH, "height": 800})
            page.goto((folder / "report" / "report.html").as_uri())
            page.screenshot(path=given.picture, full_page=True)
    shrink(given.picture)
    print(f"{given.picture}: {given.picture.stat().st_size // 1024} kB")
    return 0


def send_and_report(folder: Path, *, minutes: float) -> None:
    """Send messages, wait until they are dispatched, and run the job."""
    from airflow_delay_provider.spark.jobs import lateness
    from airflow_delay_provider.spark.jobs.command import ExitCode
    from tests.integration.pipeline.three_brokers import ALL, three_brokers
    from tests.rabbits import under_test

    os.environ.update(client_environment())
    with under_test("rabbitmq4"), three_brokers(folder) as scene:
        channels = {name: [scene.channel(name, channel) for channel in CHANNELS] for name in ALL}
        began, seconds = time.monotonic(), minutes * 60
        had_outage = False
        while (passed := time.monotonic() - began) < seconds:
            for name in ALL:
                send(scene.brokers[name], channels[name])
            if not had_outage and passed > OUTAGE * seconds:
                had_outage = True
                scene.stop_dispatcher()
                time.sleep(OUTAGE_SECONDS)
                scene.start_dispatcher()
            time.sleep(1.0)
        time.sleep(DELAY_SECONDS[1] + 5)
        give_up(scene.brokers[ALL[0]], channels[ALL[0]][0])
        arguments = ["--connection-file", str(scene.connection_file), "--output", str(folder / "report")]
        done = lateness.main([*arguments, *(word for name in ALL for word in ("--connection", name))])
        if done != ExitCode.OK:
            raise RuntimeError(f"the job ended with {done}")


def send(broker: Broker, channels: Sequence[str]) -> None:
    """Schedule a second's messages, and cancel a few."""
    now = broker.clock.now()
    messages = [
        Message(
            channel=random.choice(channels),
            payload=b"hello",
            deliver_at=now + timedelta(seconds=random.uniform(*DELAY_SECONDS)),
        )
        for _ in range(RATE)
    ]
    broker.schedule(messages)
    chosen = [
        message.id
        for message in messages
        if message.deliver_at - now > timedelta(seconds=10) and random.random() < CANCELLED
    ]
    if broker.can_recall and chosen:
        broker.cancel(chosen)


def give_up(broker: Broker, channel: str) -> None:
    """Move a message to the dead-letter channel, and put another one back, as consumers do."""
    first, second = broker.receive(channel, limit=2)
    broker.dead_letter(first, channel=f"{channel}.dead", reason=f"{Change.REFUSED}: the customer <unknown> is closed")
    broker.requeue(second, timedelta(seconds=0), reason="the shop does not answer")


if __name__ == "__main__":
    sys.exit(main())
