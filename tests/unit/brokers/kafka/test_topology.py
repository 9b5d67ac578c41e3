from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.brokers.kafka.topology import COVER_MS, TICK_MS, Topology
from airflow_delay_provider.domain.exceptions import ConfigurationError

PLAIN = Topology()
SIDE = Topology(name="side.by-side", radix=16)
RADICES = range(2, 65)
FOREVER = "-1"


def settings_of(topology: Topology) -> dict[str, Mapping[str, str]]:
    return {topic.name: topic.settings for topic in topology.topics()}


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (PLAIN.prefix, "delay.v1"),
        (PLAIN.inbox, "delay.v1.inbox"),
        (PLAIN.control, "delay.v1.control"),
        (PLAIN.recalls, "delay.v1.recalls"),
        (PLAIN.journal, "delay.v1.journal"),
        (PLAIN.dead, "delay.v1.dead"),
        (PLAIN.dispatch_group, "delay.v1.dispatch"),
        (PLAIN.rung(8_000), "delay.v1.rung.8000ms"),
        (SIDE.inbox, "delay.v1.side.by-side.inbox"),
        (SIDE.rung(2_000), "delay.v1.side.by-side.rung.2000ms"),
        (SIDE.dispatch_group, "delay.v1.side.by-side.dispatch"),
    ],
)
def test_names_are_computed_and_carry_a_version(name: str, expected: str) -> None:
    assert name == expected


@pytest.mark.parametrize("radix", RADICES)
def test_the_hold_of_a_rung_is_in_its_name(radix: int) -> None:
    """D9: so a ladder finds the rungs of another radix, with the messages that wait in them."""
    topology = Topology(radix=radix)
    for hold_ms in topology.ladder.holds_ms:
        assert PLAIN.hold_of(topology.rung(hold_ms)) == hold_ms


@pytest.mark.parametrize(
    "topic",
    [
        PLAIN.inbox,
        SIDE.rung(2_000),
        "delay.v1.rung.02000ms",
        "delay.v1.rung.ms",
        "delay.v1.rung.2000ms.dead",
        "my.delay.v1.rung.2000ms",
        "orders",
    ],
)
def test_other_topics_are_no_rungs(topic: str) -> None:
    assert PLAIN.hold_of(topic) is None


def test_ladders_of_different_names_share_no_topic() -> None:
    one, other = {*settings_of(PLAIN)}, {*settings_of(SIDE)}
    assert not one & other
    assert PLAIN.dispatch_group != SIDE.dispatch_group


@pytest.mark.parametrize("name", ["", "a", "x" * 60 + "." + "y" * 39])
def test_every_name_is_one_that_kafka_accepts(name: str) -> None:
    for topic in Topology(name=name, radix=64).topics():
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,249}", topic.name)


@pytest.mark.parametrize("name", [".", "a.", ".a", "a..b", "a b", "ä", "x" * 61, ".".join(["x" * 50] * 2 + ["y"])])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"ladder: .* is not a name; use letters, digits"):
        Topology(name=name)


@pytest.mark.parametrize("partitions", [0, -1, 1001])
def test_a_number_of_partitions_that_is_none_is_refused(partitions: int) -> None:
    with pytest.raises(ConfigurationError, match=r"partitions: .* use 1 to 1000"):
        Topology(partitions=partitions)


@pytest.mark.parametrize("radix", [0, 1, 65])
def test_a_radix_that_is_none_is_refused(radix: int) -> None:
    with pytest.raises(ConfigurationError, match=r"radix: .* is not a radix of a ladder; use 2 to 64"):
        Topology(radix=radix)


# -- rungs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("radix", "rungs"), [(2, 22), (4, 33), (16, 83)])
def test_the_radix_decides_how_many_rungs_there_are(radix: int, rungs: int) -> None:
    """D3, D4, D9: the one choice between more topics and more rests; the tick is the first rung."""
    holds_ms = Topology(radix=radix).ladder.holds_ms
    assert (len(holds_ms), holds_ms[0]) == (rungs, TICK_MS)


def test_rungs_grow_exponentially() -> None:
    """E4: a message rests in the range of what remains, and the ranges grow with it."""
    assert Topology(radix=2).ladder.holds_ms == tuple(2_000 * 2**level for level in range(22))
    assert PLAIN.ladder.holds_ms[:7] == (2_000, 4_000, 6_000, 8_000, 16_000, 24_000, 32_000)


@pytest.mark.parametrize("radix", RADICES)
def test_a_record_in_a_rung_has_less_than_two_hold_times_ahead(radix: int) -> None:
    """Of all but the longest, which are longer than half of what the ladder covers; ``ready_ms`` counts on it."""
    holds_ms = Topology(radix=radix).ladder.holds_ms
    assert all(longer <= 2 * hold for hold, longer in pairwise(holds_ms))
    assert COVER_MS // 2 < holds_ms[-1] <= 4 * COVER_MS


@given(st.integers(2, 64), st.integers(-(10**9), 10**13))
def test_every_remaining_time_has_a_rung_that_exists_or_is_held_in_memory(radix: int, remaining_ms: int) -> None:
    """E5, E11: there is no range behind the last one that a message could be put into by mistake."""
    topology = Topology(radix=radix)
    hold_ms = topology.ladder.next_hold(remaining_ms)
    if hold_ms is None:
        assert remaining_ms < TICK_MS
    else:
        assert hold_ms <= remaining_ms
        assert topology.rung(hold_ms) in settings_of(topology)


# -- partitions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "message_id", "partition"),
    [(None, "m1", 3), (None, "m2", 1), ("k", "m1", 1), ("k", "m2", 1), ("", "m1", 0)],
)
def test_a_partition_depends_on_the_key_or_the_id_and_stays_the_same_for_ever(
    key: str | None, message_id: str, partition: int
) -> None:
    """B53: messages of one key share a partition, also those scheduled by another version of this package."""
    assert PLAIN.partition_of(key, message_id) == partition


def test_messages_spread_over_all_partitions() -> None:
    counts = Counter(Topology(partitions=8).partition_of(None, f"message-{number}") for number in range(8_000))
    assert sorted(counts) == list(range(8))
    assert min(counts.values()) > 800


# -- settings ------------------------------------------------------------------------------------------------------


def test_nothing_in_which_a_message_waits_forgets_it() -> None:
    """D18, E12: no age, no size and no compaction removes undelivered messages."""
    settings = settings_of(PLAIN)
    for name in (PLAIN.inbox, PLAIN.control, PLAIN.dead, *map(PLAIN.rung, PLAIN.ladder.holds_ms)):
        assert settings[name]["cleanup.policy"] == "delete"
        assert (settings[name]["retention.ms"], settings[name]["retention.bytes"]) == (FOREVER, FOREVER)


def test_records_of_rungs_are_in_the_order_of_the_brokers_clock() -> None:
    """E6: only the head of a rung is read."""
    assert {settings["message.timestamp.type"] for name, settings in settings_of(PLAIN).items() if "rung" in name} == {
        "LogAppendTime"
    }


def test_recalls_are_compacted_and_the_journal_is_kept_for_a_week() -> None:
    settings = settings_of(PLAIN)
    assert settings[PLAIN.recalls]["cleanup.policy"] == "compact"
    assert settings[PLAIN.journal]["retention.ms"] == str(7 * 86_400_000)
    assert settings_of(Topology(journal_retention_ms=5))[PLAIN.journal]["retention.ms"] == "5"


def test_segments_of_a_rung_are_closed_in_time_to_be_removed() -> None:
    settings = settings_of(PLAIN)
    assert settings[PLAIN.rung(2_000)]["segment.ms"] == "600000"
    longest_ms = PLAIN.ladder.holds_ms[-1]
    assert int(settings[PLAIN.rung(longest_ms)]["segment.ms"]) == longest_ms // 8
