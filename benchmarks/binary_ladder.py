"""The ladder of NServiceBus and kombu: one queue a bit, which a message with that bit has to rest in.

Built from what the package has for its own ladder, so that only the shape differs: topic exchanges on 28 levels, the
bits in the routing key, and a message is published at its highest bit (kombu itself publishes at the top level).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from airflow_delay_provider.brokers.rabbitmq.topology import AT_LEAST_ONCE, Binding, Exchange, Queue
from airflow_delay_provider.domain.ladder import Ladder

LEVELS = 28
TICK_MS = 1000


class BinaryLadder:
    """All objects of the ladder; ``declaring.declare`` creates them."""

    journal = False
    shared: frozenset[str] = frozenset()
    #: The exchange that is declared last.
    ready = "bench.binary.ready"

    @cached_property
    def ladder(self) -> Ladder:
        """The holds."""
        longest_ms = TICK_MS << (LEVELS - 1)
        return Ladder.of_digits(tick_ms=TICK_MS, radix=2, cover_ms=longest_ms, longest_hold_ms=longest_ms)

    def level(self, level: int) -> str:
        """Return the exchange that reads the bit of ``level``, and the queue behind it; -1 is the exit."""
        return f"bench.binary.{level if level >= 0 else 'exit'}"

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
        for level in range(LEVELS):
            onward = {"x-message-ttl": TICK_MS << level, "x-dead-letter-exchange": self.level(level - 1)}
            yield Queue(name=self.level(level), arguments=AT_LEAST_ONCE | onward)

    def bindings(self) -> Iterator[Binding]:
        """Return, for each level, what a bit that is set and one that is not lead to."""
        for level in range(LEVELS):
            before = "*." * (LEVELS - 1 - level)
            yield Binding(source=self.level(level), destination=self.level(level), key=f"{before}1.#")
            yield Binding(
                source=self.level(level), destination=self.level(level - 1), key=f"{before}0.#", to_exchange=True
            )
