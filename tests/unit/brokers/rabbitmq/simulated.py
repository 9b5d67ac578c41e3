"""A simulated broker that routes messages through a topology."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from airflow_delay_provider.brokers.rabbitmq.topology import Binding, Queue, Topology, is_exchange


@dataclass
class Journey:
    """Where the copies of one message ended, and how long each rung held the one in the ladder."""

    ends: Counter[str] = field(default_factory=Counter)
    holds_ms: list[int] = field(default_factory=list)
    #: How long the message had waited when it first reached a queue.
    after_ms: dict[str, int] = field(default_factory=dict)
    #: The exchanges to which it was published, by the publisher and by queues that passed it on.
    passed: list[str] = field(default_factory=list)


class SimulatedBroker:
    """Exchanges (fanout, topic, default), alternate exchanges and dead-lettering by expiry."""

    def __init__(self, topology: Topology, channels: Sequence[str] = ()) -> None:
        self.kinds = {exchange.name: exchange.kind for exchange in topology.exchanges()}
        self.alternates = {
            exchange.name: exchange.arguments.get("alternate-exchange") for exchange in topology.exchanges()
        }
        self.queues = {queue.name: queue for queue in topology.queues()}
        self.bindings: dict[str, list[Binding]] = defaultdict(list)
        for binding in topology.bindings():
            self.bindings[binding.source].append(binding)
        for channel in channels:
            relay = topology.relay_queue(channel)
            self.queues[relay.name] = relay
            if not is_exchange(channel):
                self.queues[channel] = Queue(name=channel)
            for binding in topology.channel_bindings(channel):
                self.bindings[binding.source].append(binding)

    def publish(self, exchange: str, key: str) -> Journey:
        """Publish a message and let all time pass."""
        journey = Journey()
        self._arrive(exchange, key, 0, journey)
        return journey

    def delete_queue(self, name: str) -> None:
        """Remove a queue and the bindings to it."""
        del self.queues[name]
        for source, bindings in self.bindings.items():
            self.bindings[source] = [each for each in bindings if each.destination != name]

    def _arrive(self, exchange: str, key: str, after_ms: int, journey: Journey) -> None:
        journey.passed.append(exchange)
        for name in sorted(self.route(exchange, key)):
            queue = self.queues.get(name)
            ttl_ms = None if queue is None else queue.arguments.get("x-message-ttl")
            journey.after_ms[name] = min(after_ms, journey.after_ms.get(name, after_ms))
            if queue is None or ttl_ms is None:
                journey.ends[name] += 1
                continue
            if ttl_ms:
                journey.holds_ms.append(ttl_ms)
            onward = queue.arguments["x-dead-letter-exchange"]
            new_key = queue.arguments.get("x-dead-letter-routing-key", key)
            self._arrive(onward, new_key, after_ms + ttl_ms, journey)

    def route(self, exchange: str, key: str) -> set[str]:
        """The queues that get a copy, one each; an exchange that is not of the ladder is an end itself."""
        if exchange == "":
            return {key}
        reached, exchanges = set[str](), [exchange]
        for name in exchanges:
            if name not in self.kinds:
                reached.add(f"{name} by {key}")
                continue
            matching = self.matching(name, key)
            reached |= {each.destination for each in matching if not each.to_exchange}
            onward = [each.destination for each in matching if each.to_exchange]
            alternate = None if matching else self.alternates[name]
            # An exchange routes a message once, however often it gets it.
            exchanges += [each for each in dict.fromkeys((*onward, alternate)) if each and each not in exchanges]
        return reached

    def matching(self, exchange: str, key: str) -> list[Binding]:
        """The bindings of an exchange of the ladder that apply to a key."""
        is_fanout = self.kinds[exchange] == "fanout"
        return [each for each in self.bindings[exchange] if is_fanout or matches(each.key, key)]


def matches(pattern: str, key: str) -> bool:
    """Whether a topic exchange routes ``key`` by ``pattern``: ``*`` is one word, ``#`` any number of them."""
    return _matches(pattern.split("."), key.split("."))


def _matches(pattern: list[str], words: list[str]) -> bool:
    if not pattern:
        return not words
    first, *rest = pattern
    if first == "#":
        return not rest or any(_matches(rest, words[n:]) for n in range(len(words) + 1))
    return bool(words) and first in ("*", words[0]) and _matches(rest, words[1:])
