"""The ladder of NServiceBus and kombu: one queue a bit, which a message with that bit has to rest in.

Built from what the package has for its own ladder, so that only the shape differs: topic exchanges on 28 levels, the
bits in the routing key, and a message is published at its highest bit (kombu itself publishes at the top level).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from airflow_delay_provider.brokers.rabbitmq.topology import Binding, Exchange, Queue, QueueType
from airflow_delay_provider.domain.ladder import Ladder

LEVELS = 28
TICK_MS = 1000


@dataclass(frozen=True, kw_only=True)
class BinaryLadder:
    """All objects of the ladder; ``declaring.declare`` creates them."""

    queue_type: QueueType
    journal: bool = False

    @cached_property
    def ladder(self) -> Ladder:
        """The holds."""
        longest_ms = TICK_MS << (LEVELS - 1)
        return Ladder.of_digits(tick_ms=TICK_MS, radix=2, cover_ms=longest_ms, longest_hold_ms=longest_ms)

    def level(self, level: int) -> str:
        """Return the exchange that reads the bit of ``level``, and the queue behind it; -1 is the exit."""
        return f"bench.binary.{self.queue_type}.{level if level >= 0 else 'exit'}"

    @property
    def ready(self) -> str:
        """The exchange that is declared last."""
        return f"bench.binary.{self.queue_type}.ready"

    def route(self, channel: str, delay_ms: int) -> tuple[str, str]:
        """Return the exchange and the routing key of a message that is to arrive after ``delay_ms``."""
        ticks = self.ladder.round_up(delay_ms) // TICK_MS
        return self.level(ticks.bit_length() - 1), f"{'.'.join(f'{ticks:0{LEVELS}b}')}.{channel}"

    def exit_key(self, channel: str) -> str:
        """Return the key by which a channel is bound to the exit."""
        return f"#.{channel}"

    def exchanges(self) -> Iterator[Exchange]:
        """Return one a level, and the exit."""
        for level in range(-1, LEVELS):
            yield Exchange(name=self.level(level), kind="topic")

    def queues(self) -> Iterator[Queue]:
        """Return one a level."""
        kept: dict[str, Any] = {"x-queue-type": self.queue_type.value, "x-overflow": "reject-publish"}
        if self.queue_type is QueueType.QUORUM:
            kept["x-dead-letter-strategy"] = "at-least-once"
        for level in range(LEVELS):
            onward = {"x-message-ttl": TICK_MS << level, "x-dead-letter-exchange": self.level(level - 1)}
            yield Queue(name=self.level(level), arguments=kept | onward)

    def bindings(self) -> Iterator[Binding]:
        """Return, for each level, what a bit that is set and one that is not lead to."""
        for level in range(LEVELS):
            before = "*." * (LEVELS - 1 - level)
            yield Binding(source=self.level(level), destination=self.level(level), key=f"{before}1.#")
            yield Binding(
                source=self.level(level), destination=self.level(level - 1), key=f"{before}0.#", to_exchange=True
            )
