"""Processes of the Kafka benchmark: what is measured shares no interpreter with what measures it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.climber import KafkaClimber
from benchmarks.kafka_node import config_of
from benchmarks.measuring import MismatchError

#: How long nothing may be heard of a process.
SECONDS = 180.0
STOP = "stop"


class Worker:
    """A process that is talked to."""

    def __init__(self, name: str, process: Any, pipe: Connection) -> None:
        self._name = name
        self._process = process
        self._pipe = pipe

    def tell(self, what: Any) -> None:
        """Send something."""
        self._pipe.send(what)

    def hear(self, seconds: float = SECONDS) -> Any:
        """Return what it says next."""
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
    """What a process has used."""

    cpu_seconds: float
    peak_rss_mb: float

    @classmethod
    def of_this_process(cls) -> Usage:
        """Look at it now."""
        # Not ru_maxrss: that begins with what the parent had.
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return cls(cpu_seconds=time.process_time(), peak_rss_mb=int(peak[1]) / 1024 if peak else math.nan)


def dispatch(pipe: Connection, settings: Mapping[str, Any]) -> None:
    """A dispatcher in real time: says when it serves lanes, and its usage whenever it is asked or told to stop."""
    with KafkaBroker(config_of(settings)) as broker:
        climber = broker.open_climber()
        assert isinstance(climber, KafkaClimber)
        while not climber._lanes:
            climber.run_once()
        pipe.send(time.monotonic())
        while True:
            climber.run_once()
            if pipe.poll():
                try:
                    heard = pipe.recv()
                except EOFError:
                    heard = STOP
                if heard == STOP:
                    break
                pipe.send(Usage.of_this_process())
        climber.close()
    try:
        pipe.send(Usage.of_this_process())
    except BrokenPipeError:
        return
