"""The ladder as RabbitMQ objects: names, arguments and bindings, computed without asking a broker.

The routing key carries the delay in hexadecimal digits of ticks, followed by the channel::

    0.0.0.0.1.0.a.to.invoices     1 x 256 ticks + 10 ticks, then to invoices

A message waits once for each digit that is not zero, in the queue of that digit (a rung). All messages of a rung expire
after the same time, so they expire in order. An expired message is dead-lettered to the exchange of the next level with
the same routing key. Behind the last level each channel has a queue of its own, its relay: messages that a destination
refuses stay there and hold up neither rungs nor other channels. docs/rabbitmq.md draws the whole path.

An exchange may route nowhere, and then only the journal would have the message. So the relay of an exchange comes after
the record of the dispatch, the relay of a queue before it.

Rungs and relays never dead-letter into the journal, a stream: a queue waits for everything that it dead-letters into,
so all would stop while the stream does not answer. Only the dispatch log, a queue, waits for the journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from airflow_delay_provider.brokers.rabbitmq.names import Names
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.ladder import Ladder

#: A word between digits and channel, so that both can be matched by two different keys.
_TO = "to"
#: The keys of a route that is bound twice; fanout exchanges ignore them.
_TWICE = ("", "again")
#: Some versions count a look at a parked message as a delivery and drop messages that were delivered too often, 4.0 by
#: default after 20 times. Not -1, which older versions refuse.
_NO_DELIVERY_LIMIT = 1_000_000_000
RADIX = 16
#: A ladder covers at least this delay.
COVER_MS = 5 * 366 * 86_400_000
#: Each rung holds this much longer than its digit says. Brokers count whole milliseconds, so a message could expire one
#: too soon; and a delay is counted in whole milliseconds from a moment within one.
EXTRA_HOLD_MS = 2
#: RabbitMQ refuses longer hold times: ten years of 365 days.
LONGEST_HOLD_MS = 315_360_000_000 - EXTRA_HOLD_MS
MAX_NAME_BYTES = 255
#: Arguments of a queue that removes a message only after the next queue has it.
AT_LEAST_ONCE: dict[str, Any] = {
    "x-queue-type": "quorum",
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """An exchange to declare; all are durable."""

    name: str
    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Queue:
    """A queue to declare; all are durable."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """A route from an exchange to a queue or another exchange."""

    source: str
    destination: str
    key: str = ""
    to_exchange: bool = False


@dataclass(frozen=True, kw_only=True)
class Topology(Names):
    """All objects of one ladder. Ladders with other ticks exist side by side.

    Ladders of one namespace share a journal and the parked messages. Ladders of two namespaces share nothing, and
    neither leads to a channel that was prepared for the other.
    """

    #: How long the journal keeps records, such as ``7D``; a change applies to new journals only.
    journal_max_age: str = "7D"
    #: Publishing is refused when a queue of the ladder has this many messages.
    max_length: int | None = None

    @cached_property
    def ladder(self) -> Ladder:
        """The hold times of the rungs."""
        return Ladder.of_digits(tick_ms=self.tick_ms, radix=RADIX, cover_ms=COVER_MS, longest_hold_ms=LONGEST_HOLD_MS)

    @cached_property
    def levels(self) -> int:
        """The number of digits in a routing key."""
        return len(_digits(self.ladder.holds_ms[-1] // self.tick_ms))

    @cached_property
    def max_delay_ms(self) -> int:
        """The longest delay that fits into the digits."""
        unit: int = self.tick_ms * RADIX ** (self.levels - 1)
        return self.ladder.holds_ms[-1] // unit * unit + unit - self.tick_ms

    def ingresses(self) -> list[str]:
        """Return the exchanges to which schedulers publish."""
        return [self.ingress(hold_ms) for hold_ms in (None, *self.ladder.holds_ms)]

    # -- routing -------------------------------------------------------------------------------------------------

    def route(self, channel: str, delay_ms: int) -> tuple[str, str]:
        """Return the exchange and the routing key to publish with, so that a message arrives after ``delay_ms``."""
        if delay_ms > self.max_delay_ms:
            raise ValueError(f"{delay_ms} ms is more than the ladder can hold ({self.max_delay_ms} ms)")
        rounded_ms = self.ladder.round_up(delay_ms)
        digits = _digits(rounded_ms // self.tick_ms).rjust(self.levels, "0")
        return self.ingress(self.ladder.next_hold(rounded_ms)), f"{'.'.join(digits)}.{_TO}.{channel}"

    def channel_keys(self, channel: str) -> tuple[str, str]:
        """Return two keys to bind a channel with; each matches any digits and exactly this channel."""
        digits = "*." * self.levels
        return f"{digits}{_TO}.{channel}", f"{digits}*.{channel}"

    def require_fitting(self, channel: str) -> str:
        """Return the channel, or refuse one that does not fit into a routing key or the name of a relay."""
        most = MAX_NAME_BYTES - max(2 * self.levels + len(f"{_TO}."), len(self.relay("")))
        if len(channel.encode()) > most:
            raise InvalidMessageError(
                "channel", f"{channel!r} is too long for RabbitMQ", f"use at most {most} characters"
            )
        return channel

    # -- objects -------------------------------------------------------------------------------------------------

    def exchanges(self) -> Iterator[Exchange]:
        """Return all exchanges except the last one, ``ready``."""
        parks = {"alternate-exchange": self.unrouted}
        shared = [self.alternate, self.unrouted, self.parked_exchange]
        shared += [self.journal_name, self.parked_log] if self.journal else []
        yield from (Exchange(name=name, kind="fanout") for name in shared)
        yield Exchange(name=self.exit, kind="topic", arguments={"alternate-exchange": self.alternate})
        yield Exchange(name=self.dispatch, kind="fanout")
        if self.journal:
            yield Exchange(name=self.dispatch_log_exchange, kind="fanout")
        yield Exchange(name=self.arrival, kind="topic", arguments=parks)
        for level in range(self.levels):
            yield Exchange(name=self.level(level), kind="topic", arguments=parks)
        for hold_ms in self.ladder.holds_ms:
            yield Exchange(name=self.guard(hold_ms), kind="fanout", arguments=parks)
            if self.journal:
                yield Exchange(name=self.ingress(hold_ms), kind="fanout")
        yield Exchange(name=self.ingress(None), kind="fanout")

    def queues(self) -> Iterator[Queue]:
        """Return all queues except the relays."""
        yield Queue(name=self.unroutable, arguments={"x-queue-type": "quorum", "x-delivery-limit": _NO_DELIVERY_LIMIT})
        yield _forwarding(self.parking, exchange=self.parked_exchange)
        if self.journal:
            yield Queue(name=self.journal_name, arguments={"x-queue-type": "stream", "x-max-age": self.journal_max_age})
            yield _forwarding(self.dispatch_log, exchange=self.journal_name)
        yield from self.rungs()

    def rungs(self) -> Iterator[Queue]:
        """Return the queues in which messages wait."""
        limit = {} if self.max_length is None else {"x-max-length": self.max_length}
        for hold_ms in self.ladder.holds_ms:
            onward = {
                "x-message-ttl": hold_ms + EXTRA_HOLD_MS,
                "x-dead-letter-exchange": self._behind(self._level_of(hold_ms)),
            }
            yield Queue(name=self.rung(hold_ms), arguments=AT_LEAST_ONCE | limit | onward)

    def bindings(self) -> Iterator[Binding]:
        """Return all bindings except those of channels."""
        for key in _TWICE:
            yield Binding(source=self.alternate, destination=self.parking, key=key)
            yield Binding(source=self.unrouted, destination=self.parking, key=key)
            yield Binding(source=self.parked_exchange, destination=self.unroutable, key=key)
            yield Binding(source=self.dispatch, destination=self.exit, key=key, to_exchange=True)
            if self.journal:
                log = self.dispatch_log_exchange
                yield Binding(source=self.dispatch, destination=log, key=key, to_exchange=True)
                yield Binding(source=log, destination=self.dispatch_log, key=key)
        for hold_ms in self.ladder.holds_ms:
            level = self._level_of(hold_ms)
            digit = hold_ms // (self.tick_ms * RADIX**level)
            for key in self._digit_keys(level, f"{digit:x}"):
                yield Binding(source=self.level(level), destination=self.rung(hold_ms), key=key)
            yield Binding(source=self.guard(hold_ms), destination=self.rung(hold_ms))
            if self.journal:
                yield Binding(source=self.ingress(hold_ms), destination=self.guard(hold_ms), to_exchange=True)
        for level in range(self.levels):
            for key in self._digit_keys(level, "0"):
                yield Binding(source=self.level(level), destination=self._behind(level), key=key, to_exchange=True)
        yield Binding(source=self.ingress(None), destination=self.exit, to_exchange=True)
        if self.journal:
            yield Binding(source=self.parked_exchange, destination=self.parked_log, to_exchange=True)
            for source in (self.journal_name, self.parked_log, *self.ingresses()):
                yield Binding(source=source, destination=self.journal_name)

    def relay_queue(self, channel: str) -> Queue:
        """Return the relay of a channel.

        It forwards to a queue with the routing key of the ladder, to ``exchange:routing.key`` with the channel's own.
        """
        if not is_exchange(channel):
            return _forwarding(self.relay(channel), exchange=self.dispatch)
        exchange, _, key = channel.partition(":")
        return _forwarding(self.relay(channel), exchange=exchange, key=key)

    def channel_bindings(self, channel: str) -> tuple[Binding, ...]:
        """Return the route to a channel, last step first: a message that comes meanwhile is parked, not lost."""
        keys, relay = self.channel_keys(channel), self.relay(channel)
        if is_exchange(channel):
            first, last = Binding(source=self.arrival, destination=self.dispatch, to_exchange=True), relay
        else:
            first, last = Binding(source=self.arrival, destination=relay), channel
        return (
            *(Binding(source=self.exit, destination=last, key=key) for key in keys),
            *(replace(first, key=key) for key in keys),
        )

    def _level_of(self, hold_ms: int) -> int:
        return len(_digits(hold_ms // self.tick_ms)) - 1

    def _behind(self, level: int) -> str:
        return self.level(level - 1) if level else self.arrival

    def _digit_keys(self, level: int, digit: str) -> tuple[str, str]:
        """Return two keys that match a digit at its position."""
        here = f"{'*.' * (self.levels - 1 - level)}{digit}"
        return f"{here}.#", f"{here}.{'*.' * level}{_TO}.#"


def _forwarding(name: str, *, exchange: str, key: str | None = None) -> Queue:
    """Return a queue that dead-letters every message at once."""
    onward = {"x-message-ttl": 0, "x-dead-letter-exchange": exchange}
    new_key = {} if key is None else {"x-dead-letter-routing-key": key}
    return Queue(name=name, arguments=AT_LEAST_ONCE | onward | new_key)


def is_exchange(channel: str) -> bool:
    """Whether a channel is ``exchange:routing.key`` and not a queue."""
    return ":" in channel


def _digits(ticks: int) -> str:
    return f"{ticks:x}"
