from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.brokers.rabbitmq.topology import (
    GUARD_MS,
    JOURNAL,
    MAX_NAME_BYTES,
    UNROUTABLE,
    Binding,
    QueueType,
    Topology,
)
from airflow_delay_provider.exceptions import ConfigurationError, InvalidMessageError
from tests.unit.brokers.rabbitmq.simulated import SimulatedBroker, matches

QUORUM = Topology()
CLASSIC = Topology(queue_type=QueueType.CLASSIC)
TICKS_MS = (1, 100, 1_000, 60_000)
#: Names that could be taken for one another, or for digits.
CHANNELS = ("orders", "eu.orders", "orders.eu", "0.orders", "orders.0", "0", "events:order.created", "events:")
THREE_YEARS_MS = 3 * 366 * 86_400_000

TOPOLOGIES = {
    f"{kind}-{tick_ms}ms": Topology(queue_type=kind, tick_ms=tick_ms) for kind in QueueType for tick_ms in TICKS_MS
}
BROKERS = {name: SimulatedBroker(topology, CHANNELS) for name, topology in TOPOLOGIES.items()}


def end_of(channel: str) -> str:
    exchange, colon, key = channel.partition(":")
    return f"{exchange} by {key}" if colon else channel


@pytest.mark.parametrize(
    ("pattern", "key", "is_match"),
    [
        ("*.a.#", "0.a.orders", True),
        ("*.a.#", "0.a", True),
        ("*.a.#", "0.b.orders", False),
        ("a.#", "a.b.c.d", True),
        ("*.*.orders", "0.1.orders", True),
        ("*.*.orders", "0.1.eu.orders", False),
        ("#.orders", "0.1.eu.orders", True),
        ("*.orders", "orders", False),
    ],
)
def test_the_simulated_topic_exchange_matches_as_the_real_one(pattern: str, key: str, *, is_match: bool) -> None:
    assert matches(pattern, key) is is_match


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (QUORUM.prefix, "delay.v1.quorum.1000ms.relayed"),
        (CLASSIC.prefix, "delay.v1.classic.1000ms.relayed"),
        (Topology(tick_ms=50, journal=False).prefix, "delay.v1.quorum.50ms.relayed.unjournaled"),
        (QUORUM.entry(3_000), "delay.v1.quorum.1000ms.relayed.entry.3000ms"),
        (QUORUM.door(3_000), "delay.v1.quorum.1000ms.relayed.door.3000ms"),
        (QUORUM.entry(None), "delay.v1.quorum.1000ms.relayed.entry.now"),
        (QUORUM.level(0), "delay.v1.quorum.1000ms.relayed.climb.level.0"),
        (QUORUM.rung(16_000), "delay.v1.quorum.1000ms.relayed.rung.16000ms"),
        (QUORUM.arrival, "delay.v1.quorum.1000ms.relayed.climb.arrival"),
        (QUORUM.dispatch, "delay.v1.quorum.1000ms.relayed.climb.dispatch"),
        (QUORUM.exit, "delay.v1.quorum.1000ms.relayed.climb.exit"),
        (QUORUM.told, "delay.v1.quorum.1000ms.relayed.told"),
        (QUORUM.ready, "delay.v1.quorum.1000ms.relayed.ready"),
        (CLASSIC.feed, "delay.v1.classic.1000ms.relayed.feed"),
        (QUORUM.relay("events:order.created"), "delay.v1.quorum.1000ms.relayed.relay.events:order.created"),
        (QUORUM.exit_key("eu.orders"), "*.*.*.*.*.*.*.eu.orders"),
        (JOURNAL, "delay.v1.journal"),
        (UNROUTABLE, "delay.v1.unroutable"),
        (QUORUM.unrouted, "delay.v1.unrouted"),
        (QUORUM.parking, "delay.v1.parking"),
    ],
)
def test_names_are_computed_and_carry_a_version(name: str, expected: str) -> None:
    assert name == expected


@pytest.mark.parametrize(
    ("delay_ms", "entry", "key"),
    [
        (-1, "now", "0.0.0.0.0.0.0.orders"),
        (0, "now", "0.0.0.0.0.0.0.orders"),
        (1, "1000ms", "0.0.0.0.0.0.1.orders"),
        (1_000, "1000ms", "0.0.0.0.0.0.1.orders"),
        (1_001, "2000ms", "0.0.0.0.0.0.2.orders"),
        (266_000, "256000ms", "0.0.0.0.1.0.a.orders"),
        (86_400_000, "65536000ms", "0.0.1.5.1.8.0.orders"),
        (268_435_455_000, "251658240000ms", "f.f.f.f.f.f.f.orders"),
    ],
)
def test_a_delay_is_written_in_digits_and_enters_at_the_first_that_is_not_zero(
    delay_ms: int, entry: str, key: str
) -> None:
    """C7: the digits still to come are what remains of the delay."""
    assert QUORUM.route("orders", delay_ms) == (f"delay.v1.quorum.1000ms.relayed.entry.{entry}", key)


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
def test_a_delay_that_the_ladder_cannot_hold_is_refused(topology: Topology) -> None:
    topology.route("orders", topology.max_delay_ms)
    with pytest.raises(ValueError, match="more than the ladder can hold"):
        topology.route("orders", topology.max_delay_ms + 1)


def test_ladders_of_other_kinds_share_only_the_journal_and_the_parking() -> None:
    several = [QUORUM, CLASSIC, Topology(tick_ms=100), Topology(journal=False), Topology(tick_ms=100, journal=False)]
    for one in several:
        for other in several:
            if one is not other:
                assert names_of(one) & names_of(other) <= QUORUM.shared


def test_ladders_of_two_namespaces_share_nothing_and_no_permission_on_one_reaches_the_other() -> None:
    own = names_of(Topology(namespace="shop"))
    for namespace in ("delay", "shop2", "shop-v1", "my_shop"):
        other = names_of(Topology(namespace=namespace))
        assert not own & other
        assert not [name for name in other if re.search(r"^shop\.v1\.", name)]
    assert [name for name in own if not re.search(r"^shop\.v1\.", name)] == []


@pytest.mark.parametrize("namespace", ["", "a.b", "shop.v1", "a b", "ü", "x" * 41, "amq", "a*"])
def test_a_prefix_that_could_be_taken_for_another_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigurationError, match=r"prefix: '.*' is not a prefix of names; use up to 40 letters"):
        Topology(namespace=namespace)


def names_of(topology: Topology) -> set[str]:
    return {each.name for each in (*topology.queues(), *topology.exchanges())} | {topology.ready}


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
def test_names_and_keys_fit_into_amqp(topology: Topology) -> None:
    longest = "o" * 255
    with pytest.raises(InvalidMessageError, match=r"channel: 'o+' is too long for RabbitMQ; use at most [0-9]+ char"):
        topology.require_fitting(longest)
    fitting = longest
    while True:
        try:
            topology.require_fitting(fitting)
            break
        except InvalidMessageError:
            fitting = fitting[1:]
    assert len(fitting) >= 200
    _, key = topology.route(fitting, topology.max_delay_ms)
    names = [*names_of(topology), topology.relay(fitting), topology.exit_key(fitting), key]
    assert max(len(name.encode()) for name in names) <= MAX_NAME_BYTES


# -- the way of a message ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOPOLOGIES)
@given(data=st.data())
def test_every_delay_leads_to_its_channel_and_nowhere_else(name: str, data: st.DataObject) -> None:
    """C3, C7, C9: through rests that sum to the delay rounded up, by expiry and dead-lettering alone."""
    topology, broker = TOPOLOGIES[name], BROKERS[name]
    digits = data.draw(st.integers(1, topology.levels))
    delay_ms = data.draw(st.integers(1, min(topology.max_delay_ms, topology.tick_ms * 16**digits)))
    channel = data.draw(st.sampled_from(CHANNELS))

    journey = broker.publish(*topology.route(channel, delay_ms))

    path = topology.ladder.path(delay_ms)
    assert journey.rests_ms == [hold_ms + GUARD_MS for hold_ms in path]
    assert journey.ends == Counter({end_of(channel): 1, JOURNAL: 2})
    assert journey.after_ms[end_of(channel)] == topology.ladder.round_up(delay_ms) + len(path) * GUARD_MS
    assert journey.after_ms[JOURNAL] == 0


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_boundaries_of_every_level_lead_to_the_channel_too(name: str) -> None:
    """C5, C8"""
    topology, broker = TOPOLOGIES[name], BROKERS[name]
    for level in range(topology.levels):
        unit_ms = topology.tick_ms * 16**level
        for delay_ms in (unit_ms - 1, unit_ms, unit_ms + 1, 15 * unit_ms, 16 * unit_ms - 1):
            if 0 < delay_ms <= topology.max_delay_ms:
                journey = broker.publish(*topology.route("orders", delay_ms))
                assert sum(journey.rests_ms) >= delay_ms
                assert journey.ends == Counter({"orders": 1, JOURNAL: 2})


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("channel", CHANNELS)
def test_no_delay_leads_straight_to_the_channel_with_one_record(name: str, channel: str) -> None:
    """A10, C3"""
    journey = BROKERS[name].publish(*TOPOLOGIES[name].route(channel, 0))
    assert (journey.rests_ms, journey.ends) == ([], Counter({end_of(channel): 1, JOURNAL: 1}))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_longest_delay_arrives(name: str) -> None:
    """E2"""
    topology = TOPOLOGIES[name]
    journey = BROKERS[name].publish(*topology.route("orders", topology.max_delay_ms))
    assert len(journey.rests_ms) == topology.levels
    assert journey.ends == Counter({"orders": 1, JOURNAL: 2})


@pytest.mark.parametrize("delay_ms", [0, 1, 266_000])
def test_a_channel_that_is_not_bound_leads_to_the_unroutable_queue_and_the_journal_hears_of_it(delay_ms: int) -> None:
    """C12: what has no route is kept and seen; the second record is that of the parking, none is one of a dispatch."""
    journey = BROKERS["quorum-1000ms"].publish(*QUORUM.route("unknown", delay_ms))
    assert journey.ends == Counter({UNROUTABLE: 1, JOURNAL: 2})
    assert QUORUM.dispatch not in journey.passed


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("delay_ms", [1, 266_000])
def test_a_message_whose_queue_was_deleted_is_parked_once_and_the_journal_hears_of_both(
    name: str, delay_ms: int
) -> None:
    """C12: of its way in, of the publish that should have gone to the queue, and of the parking."""
    topology, broker = TOPOLOGIES[name], SimulatedBroker(TOPOLOGIES[name], ["orders", "others"])
    broker.delete_queue("orders")
    assert broker.publish(*topology.route("orders", delay_ms)).ends == Counter({UNROUTABLE: 1, JOURNAL: 3})


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("channel", ["orders", "events:order.created"])
def test_a_rung_never_publishes_to_a_destination_itself(name: str, channel: str) -> None:
    """What a destination refuses would hold up the rung, and with it every other channel."""
    topology, broker = TOPOLOGIES[name], BROKERS[name]
    _, key = topology.route(channel, 1)
    [last] = {rung.arguments["x-dead-letter-exchange"] for rung in topology.rungs()} - {
        topology.level(level) for level in range(topology.levels)
    }
    assert broker.route(last, key) - {JOURNAL, topology.feed} == {topology.relay(channel)}


def test_without_a_journal_only_the_channel_gets_the_message() -> None:
    topology = Topology(journal=False)
    broker = SimulatedBroker(topology, CHANNELS)
    assert JOURNAL not in broker.queues
    assert broker.publish(*topology.route("orders", 266_000)).ends == Counter({"orders": 1})
    assert broker.publish(*topology.route("orders", 0)).ends == Counter({"orders": 1})


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
def test_no_rung_waits_for_the_journal(topology: Topology) -> None:
    """A queue waits for all that it dead-letters into, and a stream may not answer."""
    broker = SimulatedBroker(topology, ["orders"])
    onward = {rung.arguments["x-dead-letter-exchange"] for rung in topology.rungs()}
    keys = [topology.route("orders", delay_ms)[1] for delay_ms in (1, topology.max_delay_ms)]
    for exchange, key in product(onward, keys):
        assert JOURNAL not in broker.route(exchange, key)


# -- what the broker accepts ---------------------------------------------------------------------------------------


@given(st.sampled_from(QueueType), st.integers(1, 3_600_000))
def test_every_hold_is_one_that_rabbitmq_accepts(kind: QueueType, tick_ms: int) -> None:
    """C3, E2: ten years of 365 days is the most that RabbitMQ takes; one millisecond more is refused."""
    topology = Topology(queue_type=kind, tick_ms=tick_ms)
    times_ms = [rung.arguments["x-message-ttl"] for rung in topology.rungs()]
    assert times_ms == sorted(set(times_ms))
    assert times_ms[-1] <= 10 * 365 * 86_400_000


def test_every_tick_up_to_a_second_holds_three_years_and_more() -> None:
    """C6, E2: delete personal data in two years."""
    assert min(Topology(tick_ms=tick_ms).max_delay_ms for tick_ms in range(1, 1001)) >= THREE_YEARS_MS


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
def test_no_plugin_is_needed(topology: Topology) -> None:
    """C12: every exchange and queue is of a kind that each RabbitMQ has."""
    assert {exchange.kind for exchange in topology.exchanges()} <= {"topic", "fanout"}
    assert {queue.arguments["x-queue-type"] for queue in topology.queues()} <= {"quorum", "classic", "stream"}


def test_a_quorum_ladder_lets_go_only_of_what_the_next_queue_has() -> None:
    """C11: at least once, which needs that full queues refuse instead of dropping."""
    relays = [each.relay_queue(channel) for each in (QUORUM, CLASSIC) for channel in ("orders", "events:x")]
    for rung in (*QUORUM.rungs(), *relays):
        assert rung.arguments["x-dead-letter-strategy"] == "at-least-once"
        assert rung.arguments["x-overflow"] == "reject-publish"


def test_a_limit_is_put_on_every_rung_of_a_quorum_ladder() -> None:
    """C11"""
    limited = replace(QUORUM, max_length=5)
    assert {rung.arguments["x-max-length"] for rung in limited.rungs()} == {5}
    assert not any("x-max-length" in rung.arguments for rung in QUORUM.rungs())


def test_a_limit_on_a_classic_ladder_is_refused_because_it_loses_messages() -> None:
    """C11"""
    with pytest.raises(ConfigurationError, match=r"max_length: a classic queue drops.*use queue_type=quorum"):
        Topology(queue_type=QueueType.CLASSIC, max_length=5)


@pytest.mark.parametrize("tick_ms", [0, -1, 3_600_001])
def test_a_tick_that_is_none_is_refused(tick_ms: int) -> None:
    with pytest.raises(ConfigurationError, match=r"tick: .* is not a tick; use 0.001 to 3600 seconds"):
        Topology(tick_ms=tick_ms)


def test_bindings_name_only_what_is_declared() -> None:
    for topology in TOPOLOGIES.values():
        exchanges = {each.name for each in topology.exchanges()}
        queues = {each.name for each in topology.queues()}
        for binding in topology.bindings():
            assert binding.source in exchanges
            assert binding.destination in (exchanges if binding.to_exchange else queues)


# -- while the broker starts ---------------------------------------------------------------------------------------

#: Bindings that a starting broker may have brought back before one in front of them: it works on some at a time.
AHEAD = 64


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
def test_a_message_that_moves_on_while_bindings_come_back_goes_nowhere_or_where_it_should(topology: Topology) -> None:
    """C11, C14, D12: they come back in the order of their sources; the journal or the parking alone would be a loss."""
    channels = ["orders", "events:x"]
    broker = SimulatedBroker(topology, channels)
    bindings = sorted((each for some in broker.bindings.values() for each in some), key=_order_of_recovery)
    passing_on = [*topology.rungs(), topology.relay_queue("orders")]
    onward = {queue.arguments["x-dead-letter-exchange"] for queue in passing_on}
    keys = [topology.route(channel, delay_ms)[1] for delay_ms in (1, topology.max_delay_ms) for channel in channels]
    for late in range(len(bindings)):
        back = [*bindings[:late], *bindings[late + 1 : late + 1 + AHEAD]]
        broker.bindings = defaultdict(list)
        for binding in back:
            broker.bindings[binding.source].append(binding)
        for exchange, key in product(onward, keys):
            reached = broker.route(exchange, key)
            aside = {JOURNAL, topology.parking, UNROUTABLE, topology.feed}
            assert not reached or reached - aside, f"{exchange} leads {key} to {reached} without {bindings[late]}"
        # What is parked may be told to the journal only together with being kept.
        reached = broker.route(topology.aside, keys[0])
        assert not reached or UNROUTABLE in reached, f"parked messages reach {reached} without {bindings[late]}"


def _order_of_recovery(binding: Binding) -> tuple[str, str, bool, str]:
    return binding.source, binding.key, not binding.to_exchange, binding.destination
