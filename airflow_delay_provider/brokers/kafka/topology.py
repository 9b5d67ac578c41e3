"""The ladder as Kafka topics: names and settings, computed and never looked up.

All topics of a ladder have the same number of partitions. A message stays in partition N from the inbox to its last
rung, and a dispatcher that is assigned partition N of one topic is assigned it of all. So one dispatcher alone orders,
recalls and dispatches the messages of a partition::

    inbox ──> rung.65536000ms ──> rung.8000ms ──> ... ──> channel              the path of a message
      control                                             commands for waiting messages
      recalls                                             records to skip
      journal                                             what happened to messages
      dead                                                messages that could not be delivered, with the reason
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from zlib import crc32

from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.domain.ladder import Ladder

VERSION = "delay.v1"
#: The shortest hold time of a rung; messages that are due sooner stay in the dispatcher's memory.
TICK_MS = 2000
#: The longest hold times are about this long; a message that is due later waits there several times.
COVER_MS = 50 * 86_400_000
#: What a topic of the ladder accepts; channels have limits of their own.
MAX_RECORD_BYTES = 16 * 1024 * 1024
#: A larger message was compressed on its way in, and could not be written again.
MAX_VALUE_BYTES = MAX_RECORD_BYTES - 500_000
FOREVER = "-1"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,60}(\.[A-Za-z0-9_-]{1,60})*")
_RUNG = re.compile(r"\.rung\.([0-9]+)ms$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """A topic to create, with the settings that it must have."""

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """All topics of one ladder."""

    #: Ladders of different names are independent.
    name: str = ""
    #: How many dispatchers can share the work; fixed once the topics exist.
    partitions: int = 4
    #: None is the broker's default.
    replication_factor: int | None = None
    #: Hold times are digit x radix^level x 2 s: a greater radix means more topics and fewer rungs for a message.
    radix: int = 4
    journal_retention_ms: int = 7 * 86_400_000

    def __post_init__(self) -> None:
        if self.name and (not _NAME.fullmatch(self.name) or len(self.name) > 100):
            raise ConfigurationError(f"ladder: {self.name!r} is not a name; use letters, digits, '.', '_' and '-'")
        if not 1 <= self.partitions <= 1000:
            raise ConfigurationError(f"partitions: {self.partitions} is not a number of partitions; use 1 to 1000")
        if self.radix not in range(2, 65):
            raise ConfigurationError(f"radix: {self.radix} is not a radix of a ladder; use 2 to 64")

    @cached_property
    def ladder(self) -> Ladder:
        """The hold times of the rungs."""
        return Ladder.of_digits(tick_ms=TICK_MS, radix=self.radix, cover_ms=COVER_MS, longest_hold_ms=4 * COVER_MS)

    def partition_of(self, key: str | None, message_id: str) -> int:
        """Return the partition of a message; messages of one key share it, which keeps their order."""
        return crc32((message_id if key is None else key).encode()) % self.partitions

    # -- names ---------------------------------------------------------------------------------------------------

    @cached_property
    def prefix(self) -> str:
        """The beginning of all topic names of this ladder."""
        return f"{VERSION}.{self.name}" if self.name else VERSION

    @cached_property
    def inbox(self) -> str:
        """The topic to which any program writes to schedule a message."""
        return f"{self.prefix}.inbox"

    @cached_property
    def control(self) -> str:
        """Commands for waiting messages."""
        return f"{self.prefix}.control"

    @cached_property
    def recalls(self) -> str:
        """Positions of records to skip, until they are skipped."""
        return f"{self.prefix}.recalls"

    @cached_property
    def journal(self) -> str:
        """What happened to messages."""
        return f"{self.prefix}.journal"

    @cached_property
    def dead(self) -> str:
        """Messages that a dispatcher could not deliver."""
        return f"{self.prefix}.dead"

    @cached_property
    def dispatch_group(self) -> str:
        """The consumer group of the dispatchers."""
        return f"{self.prefix}.dispatch"

    def rung(self, hold_ms: int) -> str:
        """Return the topic in which messages wait for ``hold_ms``."""
        return f"{self.prefix}.rung.{hold_ms}ms"

    def hold_of(self, topic: str) -> int | None:
        """Return how long messages wait in a topic; None if it is not a rung of this ladder."""
        found = _RUNG.search(topic)
        return int(found[1]) if found and topic == self.rung(int(found[1])) else None

    # -- what must exist -----------------------------------------------------------------------------------------

    def topics(self) -> Iterator[Topic]:
        """Return all topics. One in which messages wait must not delete them by age or size."""
        for name in (self.inbox, self.control, self.dead):
            yield Topic(name=name, settings=_keeping())
        yield Topic(
            name=self.recalls,
            settings={"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.1", "segment.ms": "3600000"},
        )
        yield Topic(
            name=self.journal,
            settings=_keeping() | {"retention.ms": str(self.journal_retention_ms)},
        )
        for hold_ms in self.ladder.holds_ms:
            # Only closed segments can be deleted after their messages have left.
            segment_ms = max(600_000, hold_ms // 8)
            yield Topic(
                name=self.rung(hold_ms),
                settings=_keeping() | {"segment.ms": str(segment_ms), "segment.bytes": str(64 * 1024 * 1024)},
            )


def _keeping() -> dict[str, str]:
    return {
        "cleanup.policy": "delete",
        "retention.ms": FOREVER,
        "retention.bytes": FOREVER,
        # Independent of the writers' clocks: a timestamp in the future would block the records behind it.
        "message.timestamp.type": "LogAppendTime",
        "max.message.bytes": str(MAX_RECORD_BYTES),
    }
