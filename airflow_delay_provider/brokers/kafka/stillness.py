"""Noticing a partition whose records have had their turn and are not taken."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.kafka.lane import Source
    from airflow_delay_provider.brokers.kafka.reading import Partition

LOOK_SECONDS = 2.0
#: The first record of a partition may be so late; one that has no progress for longer stands still.
STILL_SECONDS = 30.0


class Stillness:
    """Looks at all partitions now and then."""

    def __init__(self) -> None:
        #: What stands still, in words.
        self.found: list[str] = []
        #: The first record that is not done of each partition, and since when it is.
        self._since: dict[Partition, tuple[int, float]] = {}
        self._looked_at = 0.0

    def look(self, sources: Mapping[Partition, Source], now_ms: int) -> None:
        """Look when it is time."""
        now = time.monotonic()
        if now < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at, before, self._since = now, self._since, {}
        for where, source in sources.items():
            if _is_overdue(source, now_ms):
                low = source.progress.low
                known = before.get(where)
                self._since[where] = known if known is not None and known[0] == low else (low, now)
        self.found = [
            f"partition {lane} of {topic} stands still at {low} for {now - since:.0f} s"
            for (topic, lane), (low, since) in self._since.items()
            if now > since + STILL_SECONDS
        ]


def _is_overdue(source: Source, now_ms: int) -> bool:
    return bool(source.waiting) and source.turn_ms(source.waiting[0]) < now_ms
