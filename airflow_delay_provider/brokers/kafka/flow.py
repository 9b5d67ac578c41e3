"""How much of the ladder is in memory: what has its turn soon, and no more, however many messages wait."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from confluent_kafka import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import Consumer

    from airflow_delay_provider.brokers.kafka.lane import Source
    from airflow_delay_provider.brokers.kafka.reading import Partition

#: A partition with so few records in memory is always read on.
FEW = 200
#: Records in memory reach at least so far ahead. Reading on takes up to half a second to begin.
NEAR_MS = 4_000
FAR_MS = 8_000
#: However soon their turn is, more are not read ahead of one partition.
MANY = 20_000
LOOK_SECONDS = 0.05


class Flow:
    """Stops and starts the reading of partitions."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._stopped: set[Partition] = set()
        self._looked_at = 0.0

    def regulate(self, sources: Mapping[Partition, Source], now_ms: int) -> None:
        """Look at all partitions, a few times a second however often it is asked for."""
        if time.monotonic() < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        much = [each for each, source in sources.items() if len(source.waiting) >= FEW]
        stop = [each for each in much if each not in self._stopped and _is_full(sources[each], now_ms)]
        start = [each for each in self._stopped if each in sources and _is_hungry(sources[each], now_ms)]
        if stop:
            self._consumer.pause([TopicPartition(*each) for each in stop])
            self._stopped.update(stop)
        if start:
            self._consumer.resume([TopicPartition(*each) for each in start])
            self._stopped.difference_update(start)

    def forget(self) -> None:
        """Leave no partition stopped: those that are given back may come again."""
        if self._stopped:
            self._consumer.resume([TopicPartition(*each) for each in self._stopped])
            self._stopped.clear()


def _is_full(source: Source, now_ms: int) -> bool:
    waiting = source.waiting
    return len(waiting) >= MANY or (len(waiting) >= FEW and source.turn_ms(waiting[-1]) > now_ms + FAR_MS)


def _is_hungry(source: Source, now_ms: int) -> bool:
    waiting = source.waiting
    if len(waiting) >= MANY // 2:
        return False
    return len(waiting) < FEW // 2 or source.turn_ms(waiting[-1]) < now_ms + NEAR_MS
