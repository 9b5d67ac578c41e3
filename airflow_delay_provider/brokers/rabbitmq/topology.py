"""The ladder as RabbitMQ objects: names, arguments and bindings, computed and never looked up.

A delay is written in hexadecimal digits of ticks. The routing key carries them, followed by the channel::

    0.0.0.0.1.0.a.to.invoices     1 x 256 ticks + 10 ticks, then to invoices

A message rests once for each digit that is not zero, in the queue of that digit (a rung), whose messages all expire
after the same time and so in order. It is published to the entry of its first rung. What expires is dead-lettered to
the next level with its routing key unchanged; each level reads its own digit. Behind the last level each channel has a
queue of its own, its relay, which passes on at once. What a destination refuses stays in the relay of that channel and
is tried again; the rungs, and other channels, never wait for it::

    entry ──> door ──> first rung ─expired─> level K ──> next rung ─expired─> ... ──> arrival ──> relay of the channel
      └──> journal                   (a zero digit goes straight on)

    relay of a queue ──> dispatch ──> exit ──> the queue            arrival ──> dispatch ──> exit ──> relay ──> exchange
                            └──> told ──> feed ──> journal                         └──> told ──> feed ──> journal

    what has no route ──> alternate or unrouted ──> parking ──> aside ──> unroutable
                                                                  └──> aside.told ──> journal

So the journal's record of a dispatch is written by the publish that goes to the queue. An exchange may route nowhere,
and then the journal would be the only one to have the message; so its relay comes after the record.

Nothing on the way of messages dead-letters into the journal, which is a stream: a queue waits for all that it
dead-letters into, so rungs and relays would stand still whenever the stream does not answer. The feed, a queue, takes
the record at once and waits for them.

Up to RabbitMQ 3.13 a broker that starts brings back its bindings, several at a time and in the order of their sources'
names, while its queues pass messages on already. A message that finds no route stays where it is and is tried again. A
message that finds a part of its routes does harm: it goes to the journal alone and is lost, or to the parking although
its channel is there. Two rules prevent that (ADR 17):

- Names count from the end of the way (``1.exit`` ... ``5.level``), so everything behind a message is back before the
  message can get there. ``alternate``, where the exit parks, comes before all ladders, so that a record is never the
  only route; ``unrouted``, where levels and the arrival park, comes after all of them.
- What leads on is bound twice, and so are records. So one binding that comes back late changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from airflow_delay_provider.domain.ladder import Ladder
from airflow_delay_provider.exceptions import ConfigurationError, InvalidMessageError

_VERSION = "v1"
_ASIDE = "aside"
#: A word between digits and channel, so that both can be matched in two ways.
_TO = "to"
#: The keys of a route that is bound twice; a fanout exchange does not look at them.
_TWICE = ("", "again")
#: What the names of ladders begin with that are nobody's own.
DEFAULT_NAMESPACE = "delay"
#: Without dots, so that a permission on all names of one namespace reaches no name of another.
_NAMESPACE_FORM = re.compile(r"[A-Za-z0-9_-]{1,40}")
#: The names under the default namespace.
JOURNAL = f"{DEFAULT_NAMESPACE}.{_VERSION}.journal"
UNROUTABLE = f"{DEFAULT_NAMESPACE}.{_VERSION}.unroutable"
#: Some versions count a look at a parked message as a delivery, and drop one that was delivered too often: 4.0 by
#: default after 20 times. Not -1, which older versions refuse.
_NO_DELIVERY_LIMIT = 1_000_000_000
RADIX = 16
#: What a ladder can hold at least.
COVER_MS = 5 * 366 * 86_400_000
#: How much longer each rest lasts than its digit says. Brokers count whole milliseconds, so a rest could end one too
#: soon; and a delay is counted in whole milliseconds from a moment within one.
GUARD_MS = 2
#: RabbitMQ refuses to let a queue hold longer: ten years of 365 days.
LONGEST_HOLD_MS = 315_360_000_000 - GUARD_MS
MAX_NAME_BYTES = 255


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
class Topology:
    """All objects of one ladder. Ladders of other ticks have other names and stand side by side.

    Those of one namespace share a journal and a parking. Ladders of two namespaces share nothing, and none leads to a
    channel that was prepared for the other.
    """

    tick_ms: int = 1000
    #: What all names begin with: the tenant whose ladder it is.
    namespace: str = DEFAULT_NAMESPACE
    #: Record every schedule and dispatch in a stream.
    journal: bool = True
    #: How long the journal is kept, such as ``7D``; a change applies to new journals only.
    journal_max_age: str = "7D"
    #: Most messages in one queue of the ladder, above which publishing is refused.
    max_length: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.tick_ms <= 3_600_000:
            raise ConfigurationError(f"tick: {self.tick_ms} ms is not a tick; use 0.001 to 3600 seconds")
        if not _NAMESPACE_FORM.fullmatch(self.namespace) or self.namespace == "amq":
            raise ConfigurationError(
                f"prefix: {self.namespace!r} is not a prefix of names; use up to 40 letters, digits, - and _, not amq,"
                " which is RabbitMQ's own"
            )

    @cached_property
    def ladder(self) -> Ladder:
        """The holds."""
        return Ladder.of_digits(tick_ms=self.tick_ms, radix=RADIX, cover_ms=COVER_MS, longest_hold_ms=LONGEST_HOLD_MS)

    @cached_property
    def levels(self) -> int:
        """How many digits a routing key has."""
        return len(_digits(self.ladder.holds_ms[-1] // self.tick_ms))

    @cached_property
    def max_delay_ms(self) -> int:
        """The longest delay that can be written with the digits there are."""
        unit: int = self.tick_ms * RADIX ** (self.levels - 1)
        return self.ladder.holds_ms[-1] // unit * unit + unit - self.tick_ms

    # -- names ---------------------------------------------------------------------------------------------------

    @cached_property
    def root(self) -> str:
        """What all names of this namespace begin with."""
        return f"{self.namespace}.{_VERSION}"

    @cached_property
    def journal_name(self) -> str:
        """The stream that records what happens, and the exchange through which a reader can put a mark into it."""
        return f"{self.root}.journal"

    @cached_property
    def unroutable(self) -> str:
        """The queue in which messages are parked that have no route: a channel or a rung was deleted under them."""
        return f"{self.root}.unroutable"

    @cached_property
    def alternate(self) -> str:
        """The alternate exchange of the exit; before all ladders by its name, see above."""
        return f"{self.root}.alternate"

    @cached_property
    def unrouted(self) -> str:
        """The alternate exchange of all others; behind all ladders by its name."""
        return f"{self.root}.unrouted"

    @cached_property
    def parking(self) -> str:
        """The queue behind both, from which the journal is told what is parked."""
        return f"{self.root}.parking"

    @cached_property
    def aside(self) -> str:
        """The exchange to which the parking leads."""
        return f"{self.root}.{_ASIDE}"

    @cached_property
    def parked_told(self) -> str:
        """The exchange through which the journal is told what is parked."""
        return f"{self.aside}.told"

    @cached_property
    def shared(self) -> frozenset[str]:
        """What the ladders of a namespace share, which stays when one of them is deleted."""
        alternates = (self.alternate, self.unrouted)
        return frozenset((self.journal_name, self.unroutable, *alternates, self.parking, self.aside, self.parked_told))

    @cached_property
    def prefix(self) -> str:
        """What all names of this ladder begin with."""
        return f"{self.root}.ladder.{self.tick_ms}ms{'' if self.journal else '.unjournaled'}"

    def entry(self, hold_ms: int | None) -> str:
        """Return the exchange to publish to when the first rest is ``hold_ms``; None is no delay at all."""
        return f"{self.prefix}.entry.{'now' if hold_ms is None else f'{hold_ms}ms'}"

    def door(self, hold_ms: int) -> str:
        """Return the exchange between an entry and its rung; without a journal the two are one."""
        return f"{self.prefix}.door.{hold_ms}ms" if self.journal else self.entry(hold_ms)

    def level(self, level: int) -> str:
        """Return the exchange that reads the digit of ``level``."""
        return f"{self.prefix}.5.level.{level}"

    @cached_property
    def ready(self) -> str:
        """The exchange that is declared last: who finds it finds the whole ladder."""
        return f"{self.prefix}.ready"

    @cached_property
    def arrival(self) -> str:
        """The exchange behind the last level, at which channels are bound."""
        return f"{self.prefix}.4.arrival"

    @cached_property
    def dispatch(self) -> str:
        """The exchange to which the relays of queues pass on, and through which the journal is told."""
        return f"{self.prefix}.2.dispatch"

    @cached_property
    def exit(self) -> str:
        """The exchange at which the queues of channels are bound, and the relays of exchanges."""
        return f"{self.prefix}.1.exit"

    @cached_property
    def told(self) -> str:
        """The exchange through which the journal is told of dispatches."""
        return f"{self.prefix}.3.told"

    @cached_property
    def feed(self) -> str:
        """The queue through which the journal is told of dispatches, so that nothing but this queue waits for it."""
        return f"{self.prefix}.feed"

    def rung(self, hold_ms: int) -> str:
        """Return the queue that holds messages for ``hold_ms``."""
        return f"{self.prefix}.rung.{hold_ms}ms"

    def relay(self, channel: str) -> str:
        """Return the queue from which a channel gets its messages, and where those wait that it refuses."""
        return f"{self.prefix}.relay.{channel}"

    def is_relay(self, queue: str) -> bool:
        """Whether a queue is the relay of a channel."""
        return queue.startswith(self.relay(""))

    # -- the way of one message ----------------------------------------------------------------------------------

    def route(self, channel: str, delay_ms: int) -> tuple[str, str]:
        """Return the exchange and the routing key with which a message is published to arrive after ``delay_ms``."""
        if delay_ms > self.max_delay_ms:
            raise ValueError(f"{delay_ms} ms is more than the ladder can hold ({self.max_delay_ms} ms)")
        digits = _digits(self.ladder.round_up(delay_ms) // self.tick_ms) if delay_ms > 0 else ""
        return self._entries[digits[:1], len(digits)], f"{'.'.join(digits.rjust(self.levels, '0'))}.{_TO}.{channel}"

    @cached_property
    def _entries(self) -> dict[tuple[str, int], str]:
        """By the first digit and the number of digits."""
        entries = {("", 0): self.entry(None)}
        for hold_ms in self.ladder.holds_ms:
            digits = _digits(hold_ms // self.tick_ms)
            entries[digits[0], len(digits)] = self.entry(hold_ms)
        return entries

    def channel_keys(self, channel: str) -> tuple[str, str]:
        """Return two keys by which a channel can be bound, each for any digits and exactly this channel."""
        digits = "*." * self.levels
        return f"{digits}{_TO}.{channel}", f"{digits}*.{channel}"

    def require_fitting(self, channel: str) -> str:
        """Return the channel or refuse one whose name does not fit into a routing key beside the digits."""
        most = MAX_NAME_BYTES - max(2 * self.levels + len(f"{_TO}."), len(self.relay("")))
        if len(channel.encode()) > most:
            raise InvalidMessageError(
                "channel", f"{channel!r} is too long for RabbitMQ", f"use at most {most} characters"
            )
        return channel

    # -- objects -------------------------------------------------------------------------------------------------

    def exchanges(self) -> Iterator[Exchange]:
        """Return all exchanges but the last one, ``ready``."""
        parks = {"alternate-exchange": self.unrouted}
        yield Exchange(name=self.alternate, kind="fanout")
        yield Exchange(name=self.unrouted, kind="fanout")
        yield Exchange(name=self.aside, kind="fanout")
        if self.journal:
            yield Exchange(name=self.journal_name, kind="fanout")
            yield Exchange(name=self.parked_told, kind="fanout")
        yield Exchange(name=self.exit, kind="topic", arguments={"alternate-exchange": self.alternate})
        yield Exchange(name=self.dispatch, kind="fanout")
        if self.journal:
            yield Exchange(name=self.told, kind="fanout")
        yield Exchange(name=self.arrival, kind="topic", arguments=parks)
        for level in range(self.levels):
            yield Exchange(name=self.level(level), kind="topic", arguments=parks)
        for hold_ms in self.ladder.holds_ms:
            yield Exchange(name=self.door(hold_ms), kind="fanout", arguments=parks)
            if self.journal:
                yield Exchange(name=self.entry(hold_ms), kind="fanout")
        yield Exchange(name=self.entry(None), kind="fanout")

    def queues(self) -> Iterator[Queue]:
        """Return all queues but the relays."""
        yield Queue(name=self.unroutable, arguments={"x-queue-type": "quorum", "x-delivery-limit": _NO_DELIVERY_LIMIT})
        yield _passing_on(self.parking, exchange=self.aside)
        if self.journal:
            yield Queue(name=self.journal_name, arguments={"x-queue-type": "stream", "x-max-age": self.journal_max_age})
            yield _passing_on(self.feed, exchange=self.journal_name)
        yield from self.rungs()

    def rungs(self) -> Iterator[Queue]:
        """Return the queues in which messages rest."""
        limit = {} if self.max_length is None else {"x-max-length": self.max_length}
        for hold_ms in self.ladder.holds_ms:
            level = self._level_of(hold_ms)
            yield Queue(
                name=self.rung(hold_ms),
                arguments=AT_LEAST_ONCE
                | limit
                | {
                    "x-message-ttl": hold_ms + GUARD_MS,
                    "x-dead-letter-exchange": self.level(level - 1) if level else self.arrival,
                },
            )

    def bindings(self) -> Iterator[Binding]:
        """Return all bindings but those of channels."""
        for key in _TWICE:
            yield Binding(source=self.alternate, destination=self.parking, key=key)
            yield Binding(source=self.unrouted, destination=self.parking, key=key)
            yield Binding(source=self.aside, destination=self.unroutable, key=key)
            yield Binding(source=self.dispatch, destination=self.exit, key=key, to_exchange=True)
            if self.journal:
                yield Binding(source=self.dispatch, destination=self.told, key=key, to_exchange=True)
                yield Binding(source=self.told, destination=self.feed, key=key)
        for hold_ms in self.ladder.holds_ms:
            level = self._level_of(hold_ms)
            digit = hold_ms // (self.tick_ms * RADIX**level)
            for key in self._digit_keys(level, f"{digit:x}"):
                yield Binding(source=self.level(level), destination=self.rung(hold_ms), key=key)
            yield Binding(source=self.door(hold_ms), destination=self.rung(hold_ms))
            if self.journal:
                yield Binding(source=self.entry(hold_ms), destination=self.door(hold_ms), to_exchange=True)
        for level in range(self.levels):
            onward = self.level(level - 1) if level else self.arrival
            for key in self._digit_keys(level, "0"):
                yield Binding(source=self.level(level), destination=onward, key=key, to_exchange=True)
        yield Binding(source=self.entry(None), destination=self.exit, to_exchange=True)
        if self.journal:
            yield Binding(source=self.aside, destination=self.parked_told, to_exchange=True)
            for source in (self.journal_name, self.parked_told, *self._entries.values()):
                yield Binding(source=source, destination=self.journal_name)

    def relay_queue(self, channel: str) -> Queue:
        """Return the relay of a channel. It passes on to a queue under the routing key of the ladder, to
        ``exchange:routing.key`` under its own.

        It keeps what the destination does not take, without holding up other channels.
        """
        if not is_exchange(channel):
            return _passing_on(self.relay(channel), exchange=self.dispatch)
        exchange, _, key = channel.partition(":")
        return _passing_on(self.relay(channel), exchange=exchange, key=key)

    def channel_bindings(self, channel: str) -> tuple[Binding, ...]:
        """Return the way to a channel, from its end: a message that comes in between is parked, and nowhere else."""
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

    def _digit_keys(self, level: int, digit: str) -> tuple[str, str]:
        """Return two keys that match a digit at its place."""
        here = f"{'*.' * (self.levels - 1 - level)}{digit}"
        return f"{here}.#", f"{here}.{'*.' * level}{_TO}.#"


#: How a queue is kept that lets go of a message only when the next queue has it.
AT_LEAST_ONCE: dict[str, Any] = {
    "x-queue-type": "quorum",
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}


def _passing_on(name: str, *, exchange: str, key: str | None = None) -> Queue:
    onward = {"x-message-ttl": 0, "x-dead-letter-exchange": exchange}
    new_key = {} if key is None else {"x-dead-letter-routing-key": key}
    return Queue(name=name, arguments=AT_LEAST_ONCE | onward | new_key)


def is_aside(exchange: str) -> bool:
    """Whether an exchange is the one through which messages are parked, in any namespace."""
    return exchange.endswith(f".{_VERSION}.{_ASIDE}")


def is_exchange(channel: str) -> bool:
    """Whether a channel is ``exchange:routing.key`` and not a queue."""
    return ":" in channel


def _digits(ticks: int) -> str:
    return f"{ticks:x}"
