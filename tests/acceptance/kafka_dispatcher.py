"""A dispatcher as a program of its own, which serves one Kafka ladder until SIGTERM and survives errors."""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import signal
import threading
import time
from pathlib import Path
from typing import Any

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.domain.exceptions import DelayError

#: Like a loop of the real dispatcher: an error is reported, and the next run may succeed.
PAUSE_SECONDS = 0.2

log = logging.getLogger("dispatcher")


def config_of(given: dict[str, Any]) -> KafkaConfig:
    """``{"bootstrap": ..., "settings": {...}}`` as a configuration."""
    return KafkaConfig.from_settings(given["settings"], host=given["bootstrap"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=json.loads)
    parser.add_argument("--instance")
    parser.add_argument("--after", type=Path, help="the file that is waited for before anything is begun")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(created).3f %(levelname)s %(message)s")
    # Its stack, to find out why it does not continue.
    faulthandler.register(signal.SIGUSR1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if args.after is not None:
        log.info("ready")
        while not args.after.exists():
            time.sleep(0.01)
    with KafkaBroker(config_of(args.config)) as broker:
        dispatcher = broker.open_ladder_dispatcher(instance=args.instance)
        while not stop.is_set():
            try:
                dispatcher.run_once()
            except Exception as error:
                log.warning("failed and tries again: %s", error, exc_info=not isinstance(error, DelayError))
                time.sleep(PAUSE_SECONDS)
        log.info("closing")
        dispatcher.close()
    log.info("closed")


if __name__ == "__main__":
    main()
