"""Lateness of others while a channel in use becomes bad: `python -m tests.acceptance.kafka_bad_channels`.

Each round has two fresh channels on one ladder with a dispatcher of its own process. One of them is broken while
messages go to both, 50 a second each; a reader of committed records sees how late those of the other one are.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from confluent_kafka import Consumer, TopicPartition

from tests.acceptance.kafka_soak import Dispatcher, now_ms
from tests.integration.test_kafka_faults import Scene, headers_of
from tests.kafkas import private_broker
from tools.servers.component import wait_for

MESSAGES = 300
SPOILS: dict[str, Callable[[Scene, str], None]] = {
    "deleted": lambda scene, channel: scene.delete_channel(channel),
    "compacted": lambda scene, channel: scene.change_settings(channel, cleanup_policy="compact"),
    "small": lambda scene, channel: scene.change_settings(channel, max_message_bytes=1_000),
    "good": lambda _scene, _channel: None,
}


def lateness_ms(scene: Scene, spoil: Callable[[Scene, str], None]) -> list[int]:
    """Return how late the messages of the other channel were, in order of that."""
    bad, good = scene.channel(), scene.channel()
    late: dict[str, int] = {}
    end = threading.Event()

    def read() -> None:
        settings = {"group.id": uuid4().hex, "enable.auto.commit": False, "fetch.wait.max.ms": 20}
        with Consumer({"bootstrap.servers": scene.bootstrap, "auto.offset.reset": "earliest"} | settings) as consumer:
            consumer.assign([TopicPartition(good, 0, 0)])
            while not end.is_set():
                for record in consumer.consume(100, 0.02):
                    headers = headers_of(record)
                    assert headers["delay-id"] not in late, "a message came twice"
                    late[headers["delay-id"]] = now_ms() - int(headers["delay-deliver-at"])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        lost = [scene.message(bad, after=0.5 + 0.02 * n, payload=bytes(2_000)) for n in range(MESSAGES // 2)]
        others = [scene.message(good, after=0.5 + 0.02 * n, key=f"k{n}") for n in range(MESSAGES)]
        scene.broker.schedule([*lost, *others])
        wait_for(lambda: sum(scene.ends(bad).values()) > 20, what="messages arrive", seconds=60, interval=0.02)
        spoil(scene, bad)
        wait_for(lambda: len(late) == MESSAGES, what="all others arrive", seconds=120)
    finally:
        end.set()
        reader.join()
    return sorted(late.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--becomes", choices=SPOILS, default="deleted")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="delay-bad-") as folder,
        private_broker(Path(folder)) as broker,
        Scene(broker.bootstrap) as scene,
    ):
        dispatcher = Dispatcher({"bootstrap": broker.bootstrap, "settings": scene.settings}, Path(folder))
        try:
            wait_for(lambda: len(dispatcher.partitions()) == 2, what="the dispatcher serves", seconds=120)
            for number in range(args.rounds):
                late = lateness_ms(scene, SPOILS[args.becomes])
                found = {"p50": late[len(late) // 2], "max": late[-1], "load": round(os.getloadavg()[0], 1)}
                print(json.dumps({"round": number} | found), flush=True)
                # Due messages of the bad channel end before the next round begins.
                time.sleep(1)
        finally:
            failed = dispatcher.log.read_text(errors="replace").count(" WARNING failed")
            dispatcher.stop()
    print(json.dumps({"becomes": args.becomes, "dispatcher_failed": failed}))


if __name__ == "__main__":
    main()
