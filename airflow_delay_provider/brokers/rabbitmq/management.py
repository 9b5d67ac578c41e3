"""The broker's management API, for what AMQP cannot tell: policies, bindings, and messages that queues are forwarding.

A passive declare counts only messages that a queue can hand out. A message that a queue is dead-lettering, and that the
destination refuses, is in none of its numbers.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow_delay_provider.brokers.rabbitmq.topology import is_exchange
from airflow_delay_provider.domain.clock import Clock
from airflow_delay_provider.domain.exceptions import BrokerError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig

log = logging.getLogger(__name__)

#: Queues that forward what they get, behind the root of a namespace.
_FORWARDING = r"\.(.+\.)?(rung|relay|dispatch-log|parking)(\..*)?$"
#: How old a total may be: a quorum queue counts every 5 s, later on a busy broker.
TOTALS_LAG = timedelta(seconds=10)
#: How long a snapshot is used for the settings of destinations, and for the totals of relays.
TRUST_DESTINATIONS_SECONDS = 5.0
TRUST_TOTALS_SECONDS = 1.0
#: How often to log that the management API does not answer.
WARN_SECONDS = 60.0
_LIMITS = ("max-length", "max-length-bytes")
_HEALTHY = ("live", "running", "idle", "flow")
_IN_RELAY = ".relay."


def list_all(config: RabbitMQConfig, kind: str) -> list[dict[str, Any]]:
    """Return all objects of a kind in the connection's vhost."""
    found: list[dict[str, Any]] = _request(config, "GET", kind)
    return found


def list_queues(config: RabbitMQConfig) -> list[dict[str, Any]]:
    """Return all queues with their message totals, which include messages being forwarded and are seconds old."""
    query = {"disable_stats": "true", "enable_queue_totals": "true"}
    found: list[dict[str, Any]] = _request(config, "GET", "queues", query=query)
    return found


def list_bindings(config: RabbitMQConfig, exchange: str) -> list[dict[str, Any]]:
    """Return the bindings that lead away from an exchange."""
    found: list[dict[str, Any]] = _request(config, "GET", "exchanges", exchange, "bindings", "source")
    return found


def applied_policy(policies: list[dict[str, Any]], queue: str, queue_type: str) -> dict[str, Any]:
    """Return what the policy sets that RabbitMQ applies to a queue: of all that match, the one of highest priority.

    The server leaves that out of its answers where its statistics are switched off.
    """
    targets = ("all", "queues", f"{queue_type}_queues")
    matching = [each for each in policies if each["apply-to"] in targets and re.search(each["pattern"], queue)]
    definition: dict[str, Any] = max(matching, key=lambda each: each["priority"])["definition"] if matching else {}
    return definition


def count_forwarding(config: RabbitMQConfig) -> dict[str, int]:
    """Return how many expired messages each queue has that the next queue does not have yet.

    The broker updates its counts every few seconds.
    """
    return {
        each["name"]: count
        for each in list_queues(config)
        if (count := each.get("messages", 0) - each.get("messages_ready", 0) - each.get("messages_unacknowledged", 0))
        > 0
    }


def count_in_relays(config: RabbitMQConfig) -> dict[str, int]:
    """Return how many messages are in relays, by channel; some may be just passing."""
    return _in_relays(config.topology.root, list_queues(config))


def wake_queues(config: RabbitMQConfig) -> bool:
    """Make quorum queues retry at once messages that had no route; return whether that was possible.

    A queue whose messages found no route, as happens while a broker starts, retries after 180 s by default, and
    messages that expire behind them wait as long. Any change of its policy makes it retry at once, so a policy with no
    relevant effect is set and deleted. Messages that the next queue refused or did not confirm wait nevertheless.
    """
    if config.management_url is None:
        return False
    root = config.topology.root
    name = f"{root}.nudge"
    nudge = {
        "pattern": f"^{re.escape(root)}{_FORWARDING}",
        "definition": {"delivery-limit": 1_000_000},
        "priority": 1000,
        "apply-to": "queues",
    }
    try:
        _request(config, "PUT", "policies", name, content=nudge)
        _request(config, "DELETE", "policies", name)
    except BrokerError as error:
        log.warning("The queues of the ladder were not woken, so some messages may be late: %s", error)
        return False
    return True


def measure_clock_skew(config: RabbitMQConfig, clock: Clock) -> timedelta | None:
    """Return the clock of the management API's node minus ``clock``, up to a second off; None if it is not known.

    The time comes in whole seconds, cut off.
    """
    import httpx

    if config.management_url is None:
        return None
    url = config.management_url.rstrip("/") + "/api/whoami"
    before = clock.now()
    try:
        said = parsedate_to_datetime(httpx.get(url, timeout=config.connect_seconds).headers["date"])
    except (httpx.HTTPError, KeyError, ValueError) as error:
        log.debug("The management API of %s does not tell its time (%s)", config.name, type(error).__name__)
        return None
    asked = before + (clock.now() - before) / 2
    return said + timedelta(seconds=0.5) - asked


def _request(
    config: RabbitMQConfig,
    method: str,
    kind: str,
    *names: str,
    content: Any = None,
    query: dict[str, str] | None = None,
) -> Any:
    import httpx

    path = "/".join(quote(part, safe="") for part in (kind, config.vhost, *names))
    url = f"{config.management_url}".rstrip("/") + f"/api/{path}"
    try:
        answer = httpx.request(method, url, json=content, params=query, timeout=config.connect_seconds)
        answer.raise_for_status()
        return answer.json() if answer.content else None
    except (httpx.HTTPError, ValueError) as error:
        reason = f"{error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else type(error).__name__
        raise BrokerError(f"management_url: {config.name} does not answer there ({reason}); correct it") from None


# -- whether destinations have taken their messages ----------------------------------------------------------------


class DispatchStatus(Enum):
    """What is known of a message that was forwarded to its destination."""

    TAKEN = "taken"
    #: The relay of its channel has messages, this one or others.
    IN_RELAY = "in relay"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """The management API's answers at one time."""

    taken_at: float
    queues: dict[str, dict[str, Any]]
    policies: list[list[dict[str, Any]]]
    #: Exchanges by name, and the bindings of those that were looked up.
    exchange_kinds: dict[str, str] = field(default_factory=dict)
    bindings: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


class DispatchCheck:
    """Tells whether destinations have taken messages; without ``management_url`` all are assumed to have.

    Exact except for one case: a destination that cannot refuse a message is trusted without a look at its relay, whose
    totals are seconds old. For all others a dispatch counts once the relay was empty after it.
    """

    def __init__(self, config: RabbitMQConfig, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._monotonic = monotonic
        self._snapshot: _Snapshot | None = None
        self._warned = -WARN_SECONDS

    def check(self, channel: str, *, by: datetime, now: datetime) -> DispatchStatus:
        """Return whether a message that was forwarded at ``by`` or earlier has left the relay of its channel."""
        if self._config.management_url is None:
            return DispatchStatus.TAKEN
        try:
            if self._takes_everything(channel):
                return DispatchStatus.TAKEN
            if now < by + TOTALS_LAG:
                return DispatchStatus.UNKNOWN
            queues = self._look(TRUST_TOTALS_SECONDS).queues
        except BrokerError as error:
            self._warn(error)
            return DispatchStatus.UNKNOWN
        in_relays = _in_relays(self._config.topology.root, list(queues.values()))
        return DispatchStatus.IN_RELAY if in_relays.get(channel) else DispatchStatus.TAKEN

    def _takes_everything(self, channel: str) -> bool:
        snapshot = self._look(TRUST_DESTINATIONS_SECONDS)
        if not is_exchange(channel):
            return _takes_everything(snapshot, channel)
        exchange, _, key = channel.partition(":")
        names = list(self._reached(snapshot, exchange, key, seen=set()))
        return bool(names) and all(name is not None and _takes_everything(snapshot, name) for name in names)

    def _reached(self, snapshot: _Snapshot, exchange: str, key: str, *, seen: set[str]) -> Iterator[str | None]:
        """Return the queues to which an exchange routes a key; None where that is unknown."""
        seen.add(exchange)
        if exchange not in snapshot.bindings:
            snapshot.bindings[exchange] = list_bindings(self._config, exchange)
        if not snapshot.exchange_kinds:
            found = list_all(self._config, "exchanges")
            snapshot.exchange_kinds.update((each["name"], each["type"]) for each in found)
        kind = snapshot.exchange_kinds.get(exchange)
        for binding in snapshot.bindings[exchange]:
            if kind not in ("direct", "fanout", "topic"):
                yield None
            elif kind == "fanout" or matches(binding["routing_key"], key, is_topic=kind == "topic"):
                if binding["destination_type"] == "queue":
                    yield binding["destination"]
                elif binding["destination"] not in seen:
                    yield from self._reached(snapshot, binding["destination"], key, seen=seen)

    def _look(self, trust_seconds: float) -> _Snapshot:
        now, config = self._monotonic(), self._config
        if self._snapshot is None or now - self._snapshot.taken_at >= trust_seconds:
            policies = [list_all(config, kind) for kind in ("policies", "operator-policies")]
            queues = {queue["name"]: queue for queue in list_queues(config)}
            self._snapshot = _Snapshot(taken_at=now, queues=queues, policies=policies)
        return self._snapshot

    def _warn(self, error: BrokerError) -> None:
        now = self._monotonic()
        if now - self._warned >= WARN_SECONDS:
            self._warned = now
            log.warning("Dispatches are not announced, because it is unknown whether they arrived: %s", error)


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


def _in_relays(root: str, queues: list[dict[str, Any]]) -> dict[str, int]:
    """Count the messages in relays by channel, waiting or being forwarded."""
    counts: dict[str, int] = {}
    for queue in queues:
        name, count = queue["name"], queue.get("messages", 0)
        if count and name.startswith(f"{root}.") and _IN_RELAY in name:
            channel = name.partition(_IN_RELAY)[2]
            counts[channel] = counts.get(channel, 0) + count
    return counts


def _takes_everything(snapshot: _Snapshot, name: str) -> bool:
    """Whether a queue exists and is healthy, and has no length at which it refuses messages."""
    queue = snapshot.queues.get(name)
    if queue is None or queue.get("state", "running") not in _HEALTHY:
        return False
    set_by = [queue.get("arguments", {})]
    set_by += [applied_policy(policies, name, queue.get("type", "classic")) for policies in snapshot.policies]
    has_limit = any(limit in each or f"x-{limit}" in each for each in set_by for limit in _LIMITS)
    overflows = [str(each.get("overflow", each.get("x-overflow", ""))) for each in set_by]
    return not (has_limit and any(overflow.startswith("reject-publish") for overflow in overflows))
