from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.brokers.rabbitmq.names import JOURNAL, UNROUTABLE
from airflow_delay_provider.brokers.rabbitmq.topology import EXTRA_HOLD_MS, MAX_NAME_BYTES, Binding, Topology
from airflow_delay_provider.domain.exceptions import ConfigurationError, InvalidMessageError
from tests.ladder_path import path_of
from tests.unit.brokers.rabbitmq.simulated import SimulatedBroker, matches

LADDER = Topology()
TICKS_MS = (1, 100, 1_000, 60_000)
#: Names that could be taken for one another, or for digits.
CHANNELS = ("orders", "eu.orders", "orders.eu", "0.orders", "orders.0", "0", "events:order.created", "events:")
THREE_YEARS_MS = 3 * 366 * 86_400_000

TOPOLOGIES = {f"{tick_ms}ms": Topology(tick_ms=tick_ms) for tick_ms in TICKS_MS}
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
        (LADDER.prefix, "delay.v1.ladder.1000ms"),
        (Topology(tick_ms=50, journal=False).prefix, "delay.v1.ladder.50ms.unjournaled"),
        (LADDER.ingress(3_000), "delay.v1.ladder.1000ms.ingress.3000ms"),
        (LADDER.guard(3_000), "delay.v1.ladder.1000ms.guard.3000ms"),
        (LADDER.ingress(None), "delay.v1.ladder.1000ms.ingress.now"),
        (LADDER.level(0), "delay.v1.ladder.1000ms.5.level.0"),
        (LADDER.rung(16_000), "delay.v1.ladder.1000ms.rung.16000ms"),
        (LADDER.arrival, "delay.v1.ladder.1000ms.4.arrival"),
        (LADDER.dispatch, "delay.v1.ladder.1000ms.2.dispatch"),
        (LADDER.exit, "delay.v1.ladder.1000ms.1.exit"),
        (LADDER.dispatch_log_exchange, "delay.v1.ladder.1000ms.3.dispatch-log"),
        (LADDER.ready, "delay.v1.ladder.1000ms.ready"),
        (LADDER.dispatch_log, "delay.v1.ladder.1000ms.dispatch-log"),
        (LADDER.relay("events:order.created"), "delay.v1.ladder.1000ms.relay.events:order.created"),
        (LADDER.channel_keys("eu.orders")[0], "*.*.*.*.*.*.*.to.eu.orders"),
        (LADDER.channel_keys("eu.orders")[1], "*.*.*.*.*.*.*.*.eu.orders"),
        (JOURNAL, "delay.v1.journal"),
        (UNROUTABLE, "delay.v1.unroutable"),
        (LADDER.alternate, "delay.v1.alternate"),
        (LADDER.unrouted, "delay.v1.unrouted"),
        (LADDER.parking, "delay.v1.parking"),
    ],
)
def test_names_are_computed_and_carry_a_version(name: str, expected: str) -> None:
    assert name == expected


@pytest.mark.parametrize(
    ("delay_ms", "entry", "key"),
    [
        (-1, "now", "0.0.0.0.0.0.0.to.orders"),
        (0, "now", "0.0.0.0.0.0.0.to.orders"),
        (1, "1000ms", "0.0.0.0.0.0.1.to.orders"),
        (1_000, "1000ms", "0.0.0.0.0.0.1.to.orders"),
        (1_001, "2000ms", "0.0.0.0.0.0.2.to.orders"),
        (266_000, "256000ms", "0.0.0.0.1.0.a.to.orders"),
        (86_400_000, "65536000ms", "0.0.1.5.1.8.0.to.orders"),
        (268_435_455_000, "251658240000ms", "f.f.f.f.f.f.f.to.orders"),
    ],
)
def test_a_delay_is_written_in_digits_and_enters_at_the_first_that_is_not_zero(
    delay_ms: int, entry: str, key: str
) -> None:
    """C7: the digits still to come are what remains of the delay."""
    assert LADDER.route("orders", delay_ms) == (f"delay.v1.ladder.1000ms.ingress.{entry}", key)


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
def test_a_delay_that_the_ladder_cannot_hold_is_refused(topology: Topology) -> None:
    topology.route("orders", topology.max_delay_ms)
    with pytest.raises(ValueError, match="more than the ladder can hold"):
        topology.route("orders", topology.max_delay_ms + 1)


def test_ladders_of_other_kinds_share_only_the_journal_and_the_parking() -> None:
    several = [LADDER, Topology(tick_ms=100), Topology(journal=False), Topology(tick_ms=100, journal=False)]
    for one in several:
        for other in several:
            if one is not other:
                assert names_of(one) & names_of(other) <= LADDER.shared


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
    names = [*names_of(topology), topology.relay(fitting), *topology.channel_keys(fitting), key]
    assert max(len(name.encode()) for name in names) <= MAX_NAME_BYTES


# -- the path of a message -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOPOLOGIES)
@given(data=st.data())
def test_every_delay_leads_to_its_channel_and_nowhere_else(name: str, data: st.DataObject) -> None:
    """C3, C7, C9: through rungs whose hold times sum to the delay rounded up, by expiry and dead-lettering alone."""
    topology, broker = TOPOLOGIES[name], BROKERS[name]
    digits = data.draw(st.integers(1, topology.levels))
    delay_ms = data.draw(st.integers(1, min(topology.max_delay_ms, topology.tick_ms * 16**digits)))
    channel = data.draw(st.sampled_from(CHANNELS))

    journey = broker.publish(*topology.route(channel, delay_ms))

    path = path_of(topology.ladder, delay_ms)
    assert journey.holds_ms == [hold_ms + EXTRA_HOLD_MS for hold_ms in path]
    assert journey.ends == Counter({end_of(channel): 1, JOURNAL: 2})
    assert journey.after_ms[end_of(channel)] == topology.ladder.round_up(delay_ms) + len(path) * EXTRA_HOLD_MS
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
                assert sum(journey.holds_ms) >= delay_ms
                assert journey.ends == Counter({"orders": 1, JOURNAL: 2})


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("channel", CHANNELS)
def test_no_delay_leads_straight_to_the_channel_with_one_record(name: str, channel: str) -> None:
    """A10, C3"""
    journey = BROKERS[name].publish(*TOPOLOGIES[name].route(channel, 0))
    assert (journey.holds_ms, journey.ends) == ([], Counter({end_of(channel): 1, JOURNAL: 1}))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_longest_delay_arrives(name: str) -> None:
    """E2"""
    topology = TOPOLOGIES[name]
    journey = BROKERS[name].publish(*topology.route("orders", topology.max_delay_ms))
    assert len(journey.holds_ms) == topology.levels
    assert journey.ends == Counter({"orders": 1, JOURNAL: 2})


@pytest.mark.parametrize("delay_ms", [0, 1, 266_000])
def test_a_channel_that_is_not_bound_leads_to_the_unroutable_queue_and_the_journal_hears_of_it(delay_ms: int) -> None:
    """C12: unroutable messages are parked; the second record is that of the parking, none is one of a dispatch."""
    journey = BROKERS["1000ms"].publish(*LADDER.route("unknown", delay_ms))
    assert journey.ends == Counter({UNROUTABLE: 1, JOURNAL: 2})
    assert LADDER.dispatch not in journey.passed


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
    """Messages that a destination refuses would block the rung, and with it every other channel."""
    topology, broker = TOPOLOGIES[name], BROKERS[name]
    _, key = topology.route(channel, 1)
    [last] = {rung.arguments["x-dead-letter-exchange"] for rung in topology.rungs()} - {
        topology.level(level) for level in range(topology.levels)
    }
    assert broker.route(last, key) - {JOURNAL, topology.dispatch_log} == {topology.relay(channel)}


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


@given(st.integers(1, 3_600_000))
def test_every_hold_is_one_that_rabbitmq_accepts(tick_ms: int) -> None:
    """C3, E2: ten years of 365 days is the most that RabbitMQ takes; one millisecond more is refused."""
    topology = Topology(tick_ms=tick_ms)
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
    assert {queue.arguments["x-queue-type"] for queue in topology.queues()} <= {"quorum", "stream"}


def test_a_ladder_removes_a_message_only_once_the_next_queue_has_it() -> None:
    """C11: at least once, which needs that full queues refuse instead of dropping."""
    relays = [LADDER.relay_queue(channel) for channel in ("orders", "events:x")]
    for rung in (*LADDER.rungs(), *relays):
        assert rung.arguments["x-dead-letter-strategy"] == "at-least-once"
        assert rung.arguments["x-overflow"] == "reject-publish"


def test_a_limit_is_put_on_every_rung() -> None:
    """C11"""
    limited = replace(LADDER, max_length=5)
    assert {rung.arguments["x-max-length"] for rung in limited.rungs()} == {5}
    assert not any("x-max-length" in rung.arguments for rung in LADDER.rungs())


@pytest.mark.parametrize("tick_ms", [0, -1, 3_600_001])
def test_a_tick_that_is_none_is_refused(tick_ms: int) -> None:
    with pytest.raises(ConfigurationError, match=r"tick: .* is not a tick; use 0.001 to 3600 seconds"):
        Topology(tick_ms=tick_ms)


def test_bindings_name_only_declared_objects() -> None:
    for topology in TOPOLOGIES.values():
        exchanges = {each.name for each in topology.exchanges()}
        queues = {each.name for each in topology.queues()}
        bindings = list(topology.bindings())
        for binding in bindings:
            assert binding.source in exchanges
            assert binding.destination in (exchanges if binding.to_exchange else queues)
        bindings += (each for channel in ("orders", "events:x") for each in topology.channel_bindings(channel))
        assert len(set(bindings)) == len(bindings), "a broker keeps one of two that are the same"


# -- while the broker starts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
@pytest.mark.parametrize("channel", ["orders", "events:x"])
def test_a_message_that_leaves_a_rung_while_bindings_come_back_goes_where_it_should_or_nowhere(
    topology: Topology, channel: str
) -> None:
    """C11, C14, D12: with its record, and never to the parking."""
    broker = SimulatedBroker(topology, [channel])
    onward = {rung.arguments["x-dead-letter-exchange"] for rung in topology.rungs()}
    keys = {topology.route(channel, delay_ms)[1] for delay_ms in (1, topology.max_delay_ms)}
    for exchange, key in product(onward, keys):
        expected = broker.route(exchange, key)
        for reached, state in routes_while_starting(broker, exchange, key):
            assert reached in (set(), expected), f"{exchange} leads {key} to {reached} with {state}"


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
def test_a_message_that_leaves_a_relay_while_bindings_come_back_is_not_taken_for_dispatched(topology: Topology) -> None:
    """C11, C14, D12: the record alone would be a loss."""
    _, key = topology.route("orders", 1)
    broker = SimulatedBroker(topology, ["orders"])
    for reached, state in routes_while_starting(broker, topology.dispatch, key):
        assert not reached or reached in ({"orders"}, {"orders", topology.dispatch_log}), f"{reached} with {state}"
    broker.delete_queue("orders")
    for reached, state in routes_while_starting(broker, topology.dispatch, key):
        assert not reached or topology.parking in reached, f"{reached} with {state}"


def test_a_message_that_is_parked_while_bindings_come_back_is_kept() -> None:
    broker = SimulatedBroker(LADDER)
    for reached, state in routes_while_starting(broker, LADDER.parked_exchange, ""):
        assert not reached or UNROUTABLE in reached, f"{reached} with {state}"


def routes_while_starting(broker: SimulatedBroker, exchange: str, key: str) -> Iterator[tuple[set[str], str]]:
    """Route a message at every moment of a start: bindings come back in order, and any one may be later than all."""
    whole = broker.bindings
    known = sorted(concerned(broker, exchange, key), key=_order_of_recovery)
    try:
        for count in range(1, len(known) + 1):
            for late in (None, *known[: count - 1]):
                back = [each for each in known[:count] if each is not late]
                broker.bindings = defaultdict(list)
                for binding in back:
                    broker.bindings[binding.source].append(binding)
                yield broker.route(exchange, key), f"the first {count} bindings back, but for {late}"
    finally:
        broker.bindings = whole


def concerned(broker: SimulatedBroker, exchange: str, key: str) -> Iterator[Binding]:
    """The bindings that a message may use."""
    exchanges = [exchange]
    for name in exchanges:
        matching = broker.matching(name, key)
        yield from matching
        onward = [*(each.destination for each in matching if each.to_exchange), broker.alternates[name]]
        exchanges += [each for each in dict.fromkeys(onward) if each and each not in exchanges]


def _order_of_recovery(binding: Binding) -> tuple[str, str, bool, str]:
    return binding.source, binding.key, not binding.to_exchange, binding.destination


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
def test_a_rung_holds_what_its_name_says_and_two_roundings_of_a_millisecond(topology: Topology) -> None:
    """C9: shorter is early, by the broker's rounding and by that of the delay; longer is late for nothing."""
    assert [rung.arguments["x-message-ttl"] for rung in topology.rungs()] == [
        hold_ms + 2 for hold_ms in topology.ladder.holds_ms
    ]
