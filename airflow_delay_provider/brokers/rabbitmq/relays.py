"""Whether destinations have taken their messages: what the relays hold, as far as the management API tells it.

AMQP has no signal for it. A passive declare counts the messages that a queue could hand out; those that it is passing
on, and that a destination refuses, are in none of its numbers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

from airflow_delay_provider.brokers.rabbitmq.management import applied, list_all, list_bindings, list_queues
from airflow_delay_provider.brokers.rabbitmq.topology import is_exchange
from airflow_delay_provider.exceptions import BrokerError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig

log = logging.getLogger(__name__)

#: How old a total may be: a quorum queue counts every 5 s, later on a busy broker.
TOTALS_LAG = timedelta(seconds=10)
#: How long the destinations that were found are taken to be as they were, and how often totals are looked at.
TRUST_DESTINATIONS_SECONDS = 5.0
TRUST_TOTALS_SECONDS = 1.0
#: How often it is said that the management API does not answer.
WARN_SECONDS = 60.0
_LIMITS = ("max-length", "max-length-bytes")
_WELL = ("live", "running", "idle", "flow")
_IN_RELAY = ".relay."


class Verdict(Enum):
    """What is known of a message that was passed on to its destination."""

    TAKEN = "taken"
    #: The relay of its channel holds messages, this one or others.
    HELD = "held"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class _Picture:
    """What the management API said at one time."""

    #: What the names of all ladders begin with.
    root: str
    taken_at: float
    queues: dict[str, dict[str, Any]]
    policies: list[list[dict[str, Any]]]
    #: The bindings of exchanges that were asked for.
    bindings: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def held(self) -> dict[str, int]:
        """How many messages the relays hold, by channel, ready or being passed on."""
        counts: dict[str, int] = {}
        for name, queue in self.queues.items():
            if name.startswith(f"{self.root}.") and _IN_RELAY in name and (count := queue.get("messages", 0)):
                channel = name.partition(_IN_RELAY)[2]
                counts[channel] = counts.get(channel, 0) + count
        return counts


def count_held(config: RabbitMQConfig) -> dict[str, int]:
    """Return how many messages wait in relays, by channel; one that was just passed on may be among them."""
    return _Picture(root=config.topology.root, taken_at=0.0, queues=_by_name(config), policies=[]).held


class Relays:
    """Answers for a connection with ``management_url``; without one every message is taken to have arrived.

    Exact but for one case: a destination that cannot refuse a message is trusted to have it, without a look at its
    relay, whose numbers are seconds old. For all others a dispatch counts once the relay was empty after it.
    """

    def __init__(self, config: RabbitMQConfig, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._monotonic = monotonic
        self._picture: _Picture | None = None
        self._warned = -WARN_SECONDS

    def judge(self, channel: str, *, by: datetime, now: datetime) -> Verdict:
        """Say whether a message that was passed on by a time, or before, has left its relay."""
        if self._config.management_url is None:
            return Verdict.TAKEN
        try:
            if self._takes_everything(channel):
                return Verdict.TAKEN
            if now < by + TOTALS_LAG:
                return Verdict.UNKNOWN
            held = self._look(TRUST_TOTALS_SECONDS).held
        except BrokerError as error:
            self._warn(error)
            return Verdict.UNKNOWN
        return Verdict.HELD if held.get(channel) else Verdict.TAKEN

    def _takes_everything(self, channel: str) -> bool:
        picture = self._look(TRUST_DESTINATIONS_SECONDS)
        if not is_exchange(channel):
            return _takes_everything(picture, channel)
        exchange, _, key = channel.partition(":")
        names = list(self._reached(picture, exchange, key, seen=set()))
        return bool(names) and all(name is not None and _takes_everything(picture, name) for name in names)

    def _reached(self, picture: _Picture, exchange: str, key: str, *, seen: set[str]) -> Iterator[str | None]:
        """The queues to which an exchange leads a key; None for what cannot be told."""
        seen.add(exchange)
        if exchange not in picture.bindings:
            picture.bindings[exchange] = list_bindings(self._config, exchange)
        kind = self._kind_of(picture, exchange)
        for binding in picture.bindings[exchange]:
            if kind not in ("direct", "fanout", "topic"):
                yield None
            elif kind == "fanout" or matches(binding["routing_key"], key, is_topic=kind == "topic"):
                if binding["destination_type"] == "queue":
                    yield binding["destination"]
                elif binding["destination"] not in seen:
                    yield from self._reached(picture, binding["destination"], key, seen=seen)

    def _kind_of(self, picture: _Picture, exchange: str) -> str | None:
        kinds = picture.bindings.get("")
        if kinds is None:
            kinds = picture.bindings[""] = list_all(self._config, "exchanges")
        return next((each["type"] for each in kinds if each["name"] == exchange), None)

    def _look(self, trust_seconds: float) -> _Picture:
        now, config = self._monotonic(), self._config
        if self._picture is None or now - self._picture.taken_at >= trust_seconds:
            policies = [list_all(config, kind) for kind in ("policies", "operator-policies")]
            self._picture = _Picture(
                root=config.topology.root, taken_at=now, queues=_by_name(config), policies=policies
            )
        return self._picture

    def _warn(self, error: BrokerError) -> None:
        now = self._monotonic()
        if now - self._warned >= WARN_SECONDS:
            self._warned = now
            log.warning("Dispatches are not announced, because it cannot be seen whether they arrived: %s", error)


def matches(pattern: str, key: str, *, is_topic: bool) -> bool:
    """Whether a direct or a topic exchange routes ``key`` by a binding."""
    return _matches(pattern.split("."), key.split(".")) if is_topic else pattern == key


def _matches(pattern: list[str], words: list[str]) -> bool:
    if not pattern:
        return not words
    first, *rest = pattern
    if first == "#":
        return not rest or any(_matches(rest, words[n:]) for n in range(len(words) + 1))
    return bool(words) and first in ("*", words[0]) and _matches(rest, words[1:])


def _by_name(config: RabbitMQConfig) -> dict[str, dict[str, Any]]:
    return {queue["name"]: queue for queue in list_queues(config)}


def _takes_everything(picture: _Picture, name: str) -> bool:
    """Whether a queue is there and well, and has no length at which it refuses."""
    queue = picture.queues.get(name)
    if queue is None or queue.get("state", "running") not in _WELL:
        return False
    set_by = [queue.get("arguments", {})]
    set_by += [applied(policies, name, queue.get("type", "classic")) for policies in picture.policies]
    has_limit = any(limit in each or f"x-{limit}" in each for each in set_by for limit in _LIMITS)
    overflows = [str(each.get("overflow", each.get("x-overflow", ""))) for each in set_by]
    return not (has_limit and any(overflow.startswith("reject-publish") for overflow in overflows))
