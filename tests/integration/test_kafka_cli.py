"""`airflow delay` over Kafka: the ladder's topics, and messages that wait in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

from airflow_delay_provider.brokers.kafka.topology import Topology
from tests.integration.kafka_with_dispatcher import CONN_ID, Stream, stream_with_dispatcher
from tests.kafkas import connection_of, create_topic, fresh_topic, require_kafka
from tests.unit.cli.commandline import CommandLine
from tools.servers.component import wait_for

CONN = ("--conn-id", CONN_ID)
NEW = ("--conn-id", "new")


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stream]:
    ledger: Path = tmp_path_factory.mktemp("stream") / "ledger.db"
    with stream_with_dispatcher(f"sqlite:///{ledger}") as served:
        yield served


@pytest.fixture
def delay(capfd: pytest.CaptureFixture[str], stream: Stream, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """`airflow delay` with the connection ``stream`` and the ledger into which its dispatcher projects."""
    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", stream.ledger_url)
    return CommandLine(capfd)


@pytest.fixture
def channel(stream: Stream) -> str:
    return stream.topic()


# -- messages ------------------------------------------------------------------------------------------------------


def test_messages_are_scheduled_listed_changed_and_consumed(delay: CommandLine, stream: Stream, channel: str) -> None:
    """A20, A27, A45, B14"""
    ids = [f"{channel}-{number}" for number in range(4)]
    for message_id in ids:
        scheduled = delay.document(
            "schedule", channel, "--payload", message_id, "--after", "3600", "--id", message_id, *CONN
        )
        assert scheduled["outcome"] == "scheduled"
    delay.document("cancel", ids[0], *CONN)
    delay.document("reschedule", ids[1], "--after", "1", *CONN)
    delay.document("expedite", ids[2], *CONN)
    consumed = delay("consume", channel, "--limit", "2", "--timeout", "90", *CONN)
    assert consumed.code == 0, consumed.err
    assert {line["message_id"] for line in consumed.lines} == {ids[1], ids[2]}

    def counts() -> dict[str, int]:
        found: dict[str, int] = delay.document("status", "--channel", channel, *CONN)["counts"]
        return found

    expected = {"SCHEDULED": 1, "DISPATCHED": 2, "CANCELLED": 1, "DEAD": 0}
    wait_for(lambda: counts() == expected, what="all is projected", seconds=90, interval=0.2)
    [waiting] = delay.document("list", "--channel", channel, "--state", "SCHEDULED", *CONN)["messages"]
    assert (waiting["message_id"], waiting["hold"], waiting["destination"]) == (ids[3], "broker", CONN_ID)
    history = delay.document("show", ids[1], *CONN)["history"]
    assert [entry["change"] for entry in history] == ["scheduled", "rescheduled", "dispatched"]


def test_changes_of_dispatched_or_unknown_messages_are_refused(delay: CommandLine, channel: str) -> None:
    """A27"""
    sent = delay.document("send", channel, "--payload", "x", *CONN)["message_id"]
    late = delay("cancel", sent, *CONN)
    assert (late.code, "is DISPATCHED since" in late.err) == (1, True), late.err
    unknown = delay("expedite", "nobody", *CONN)
    assert (unknown.code, unknown.err) == (
        1,
        "message 'nobody' is not known; `airflow delay list` shows the known messages\n",
    )


def test_a_file_is_scheduled(delay: CommandLine, stream: Stream, channel: str, tmp_path: Path) -> None:
    file = tmp_path / "orders.jsonl"
    file.write_text("".join(f'{{"payload": {number}}}\n' for number in range(20)))
    assert delay.document("schedule", channel, "--file", str(file), "--after", "1", *CONN)["scheduled"] == 20
    assert sorted(int(message.payload) for message in stream.received(channel, 20)) == list(range(20))


# -- topology ------------------------------------------------------------------------------------------------------


@pytest.fixture
def ladder(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> Iterator[Topology]:
    """A ladder behind the connection ``new`` that does not exist yet and that no dispatcher serves."""
    topology = Topology(name=f"cli-{uuid4().hex[:8]}", partitions=1)
    define(monkeypatch, topology)
    yield topology
    names = [name for name in topics(stream) if name.startswith(topology.prefix)]
    with AdminClient({"bootstrap.servers": stream.bootstrap}) as admin:
        for done in (admin.delete_topics(names) if names else {}).values():
            done.result(60)


def define(monkeypatch: pytest.MonkeyPatch, topology: Topology, **settings: Any) -> None:
    settings = {"ladder": topology.name, "partitions": topology.partitions, **settings}
    monkeypatch.setenv("AIRFLOW_CONN_NEW", json.dumps(connection_of(require_kafka(), **settings)))


def topics(stream: Stream) -> set[str]:
    with AdminClient({"bootstrap.servers": stream.bootstrap}) as admin:
        return set(admin.list_topics(timeout=60).topics)


def problems(delay: CommandLine) -> list[str]:
    result = delay("topology", "verify", *NEW, "--output", "json")
    assert result.code == (1 if result.document["problems"] else 0), result.err
    return [each["text"] for each in result.document["issues"] if each["kind"] == "problem"]


def test_missing_topics_of_channels_are_created_on_request(
    delay: CommandLine, stream: Stream, ladder: Topology
) -> None:
    words, name = ["topology", "create", *NEW, "--channel"], f"orders-{uuid4().hex}"
    missing = delay(*words, name)
    assert (missing.code, f"has no topic {name!r}" in missing.err) == (2, True)
    for _ in range(2):
        delay.document(*words, name, "--create-channels")
    assert name in topics(stream)
    with AdminClient({"bootstrap.servers": stream.bootstrap}) as admin:
        admin.delete_topics([name])[name].result(60)
    refused = delay(*words, ladder.inbox, "--create-channels")
    assert (refused.code, "belongs to a ladder" in refused.err) == (2, True)


def test_a_ladder_is_created_verified_and_deleted(delay: CommandLine, stream: Stream, ladder: Topology) -> None:
    """C12"""
    assert problems(delay) == [f"the ladder {ladder.prefix} does not exist; run `airflow delay topology create`"]
    for _ in range(2):
        assert delay.document("topology", "create", *NEW) == {"topology": ladder.prefix, "channels": []}
        assert problems(delay) == []
    names = {topic.name for topic in ladder.topics()}
    assert names <= topics(stream)
    assert delay.document("topology", "delete", *NEW, "--yes") == {"topology": ladder.prefix, "deleted": True}
    assert not names & topics(stream)
    assert delay("topology", "delete", *NEW, "--yes").code == 0


def test_the_channels_that_are_named_must_exist(delay: CommandLine, stream: Stream, ladder: Topology) -> None:
    channel = fresh_topic(stream.bootstrap)
    assert delay.document("topology", "create", "--channel", channel, *NEW)["channels"] == [channel]
    missing = delay("topology", "create", "--channel", "no-such-topic", *NEW)
    assert (missing.code, "has no topic 'no-such-topic'; create it" in missing.err) == (2, True), missing.err


def test_messages_that_wait_keep_a_ladder_from_being_deleted(
    delay: CommandLine, stream: Stream, ladder: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = replace(ladder, partitions=4)
    define(monkeypatch, ladder)
    channel = fresh_topic(stream.bootstrap)
    message_id = next(each for each in map(str, range(100)) if ladder.partition_of(None, each) == 3)
    delay.document("schedule", channel, "--payload", "x", "--after", "3600", "--id", message_id, *NEW)
    assert problems(delay) == []
    for partitions in (4, 2):
        # Also with a connection that knows of fewer partitions than there are.
        define(monkeypatch, ladder, partitions=partitions)
        refused = delay("topology", "delete", *NEW, "--yes")
        assert (refused.code, f"messages wait in topic {ladder.inbox}" in refused.err) == (1, True), refused.err
    assert delay("topology", "delete", *NEW, "--yes", "--force").code == 0
    assert ladder.inbox not in topics(stream)


def test_missing_and_different_objects_are_problems(
    delay: CommandLine, stream: Stream, ladder: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D18: messages that wait would be gone."""
    delay.document("topology", "create", *NEW)
    rung, forgetful = ladder.rung(ladder.ladder.holds_ms[0]), ladder.rung(ladder.ladder.holds_ms[-1])
    with AdminClient({"bootstrap.servers": stream.bootstrap}) as admin:
        admin.delete_topics([rung])[rung].result(60)
        change = ConfigEntry("retention.ms", "1000", incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, forgetful, incremental_configs=[change])
        admin.incremental_alter_configs([resource])[resource].result(60)
        wait_for(lambda: rung not in topics(stream), what="the topic is gone", seconds=90, interval=0.05)
        found = problems(delay)
        assert f"topic {rung} is missing; run `airflow delay topology create`" in found
        assert [text for text in found if text.startswith(f"topic {forgetful} has retention.ms=1000 and needs -1")]
        refused = delay("topology", "create", *NEW)
        assert (refused.code, f"topic {forgetful} has retention.ms=1000" in refused.err) == (3, True), refused.err
        admin.delete_topics([forgetful])[forgetful].result(60)
        wait_for(lambda: forgetful not in topics(stream), what="the topic is gone", seconds=90, interval=0.05)
    assert delay("topology", "create", *NEW).code == 0
    assert problems(delay) == []
    define(monkeypatch, ladder, partitions=3)
    assert [text for text in problems(delay) if text.startswith(f"topic {ladder.inbox} has 1 partitions and the")]


def test_a_topic_of_the_same_beginning_is_not_the_ladders(delay: CommandLine, stream: Stream, ladder: Topology) -> None:
    delay.document("topology", "create", *NEW)
    other = f"{ladder.prefix}.other"
    with AdminClient({"bootstrap.servers": stream.bootstrap}) as admin:
        create_topic(admin, NewTopic(other, 1))
    assert delay("topology", "delete", *NEW, "--yes").code == 0
    assert {name for name in topics(stream) if name.startswith(ladder.prefix)} == {other}
