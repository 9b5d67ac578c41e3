"""`airflow delay topology` on a real RabbitMQ, in a vhost of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import pika
import pytest

from airflow_delay_provider.brokers.rabbitmq.names import JOURNAL, UNROUTABLE
from airflow_delay_provider.brokers.rabbitmq.topology import Topology
from tests.rabbits import connection_of, fresh_vhost, manage, require_management
from tests.unit.cli.commandline import CommandLine

#: A long tick has fewer queues, and nothing here is waited for.
TOPOLOGY = Topology(tick_ms=60_000)
CONN = ("--conn-id", "rabbit")


@pytest.fixture
def vhost_url() -> Iterator[str]:
    with fresh_vhost() as url:
        yield url


@pytest.fixture
def delay(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, vhost_url: str) -> CommandLine:
    """`airflow delay` with a connection ``rabbit``, which may look at policies and bindings."""
    define(monkeypatch, vhost_url, management_url=require_management())
    return CommandLine(capfd)


def define(monkeypatch: pytest.MonkeyPatch, url: str, **settings: Any) -> None:
    connection = connection_of(url, tick=60, **settings)
    monkeypatch.setenv("AIRFLOW_CONN_RABBIT", json.dumps(connection))


@contextmanager
def amqp(url: str) -> Iterator[Any]:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        yield connection.channel()


def names_in(url: str, what: str) -> set[str]:
    vhost = urlsplit(url).path[1:]
    answer = httpx.get(f"{require_management()}/api/{what}/{vhost}", timeout=60).raise_for_status()
    return {each["name"] for each in answer.json() if each["name"].startswith("delay.v1")}


def issues(delay: CommandLine, kind: str) -> list[str]:
    result = delay("topology", "verify", *CONN, "--output", "json")
    found = [each["text"] for each in result.document["issues"] if each["kind"] == kind]
    assert result.code == (1 if result.document["problems"] else 0)
    return found


def test_a_ladder_is_created_verified_and_deleted(delay: CommandLine, vhost_url: str) -> None:
    """C12: a command instead of a fragile set-up by hand."""
    assert issues(delay, "problem") == [
        f"the ladder {TOPOLOGY.prefix} does not exist; run `airflow delay topology create`"
    ]
    assert names_in(vhost_url, "queues") == set()
    for _ in range(2):
        assert delay.document("topology", "create", *CONN) == {"topology": TOPOLOGY.prefix, "channels": []}
        assert issues(delay, "problem") == []
    assert names_in(vhost_url, "queues") == {queue.name for queue in TOPOLOGY.queues()}
    assert names_in(vhost_url, "exchanges") == {each.name for each in TOPOLOGY.exchanges()} | {TOPOLOGY.ready}
    assert delay.document("topology", "delete", *CONN, "--yes")["deleted"] is True
    assert names_in(vhost_url, "queues") == {JOURNAL, UNROUTABLE, TOPOLOGY.parking}
    assert names_in(vhost_url, "exchanges") == TOPOLOGY.shared - {UNROUTABLE, TOPOLOGY.parking}


def test_messages_that_wait_keep_a_ladder_from_being_deleted(delay: CommandLine, vhost_url: str) -> None:
    with amqp(vhost_url) as channel:
        channel.queue_declare("orders", durable=True)
    delay.document("schedule", "orders", "--payload", "x", "--after", "90000", *CONN)
    result = delay("topology", "delete", *CONN, "--yes")
    assert result.code == 1
    assert result.err == (
        f"1 messages wait in 1 queues of {TOPOLOGY.prefix} and would be lost; wait until they are delivered, or add"
        " --force to lose them\n"
    )
    assert issues(delay, "problem") == []
    assert delay("topology", "delete", *CONN, "--yes", "--force").code == 0
    assert TOPOLOGY.ready not in names_in(vhost_url, "exchanges")


def test_routes_to_channels_are_created(delay: CommandLine, vhost_url: str) -> None:
    missing = delay("topology", "create", *CONN, "--channel", "orders")
    assert (missing.code, "queue 'orders' does not exist" in missing.err) == (2, True)
    with amqp(vhost_url) as channel:
        channel.queue_declare("orders", durable=True)
        channel.exchange_declare("events", "topic", durable=True)
    delay.document("topology", "create", *CONN, "--channel", "orders", "--channel", "events:order.created")
    vhost = urlsplit(vhost_url).path[1:]
    path = f"exchanges/{vhost}/{TOPOLOGY.exit}/bindings/source"
    bound = httpx.get(f"{require_management()}/api/{path}", timeout=60).json()
    assert {each["destination"] for each in bound} == {"orders", TOPOLOGY.relay("events:order.created")}


def test_missing_queues_of_channels_are_created_on_request(delay: CommandLine, vhost_url: str) -> None:
    words = ["topology", "create", *CONN, "--create-channels"]
    refused = delay(*words, "--channel", "events:order.created")
    assert (refused.code, "names an exchange" in refused.err) == (2, True)
    for _ in range(2):
        delay.document(*words, "--channel", "orders")
    delay.document("send", "orders", "--payload", "x", *CONN)
    with amqp(vhost_url) as channel:
        channel.queue_declare("orders", durable=True, arguments={"x-queue-type": "quorum"})


def test_missing_and_different_objects_are_problems(delay: CommandLine, vhost_url: str) -> None:
    delay.document("topology", "create", *CONN)
    rung, other, level = TOPOLOGY.rung(60_000), TOPOLOGY.rung(120_000), TOPOLOGY.level(2)
    with amqp(vhost_url) as channel:
        channel.queue_delete(rung)
        channel.queue_delete(other)
        channel.queue_declare(other, durable=True, arguments={"x-queue-type": "quorum"})
        channel.exchange_delete(level)
    found = issues(delay, "problem")
    assert f"queue {rung} is missing; run `airflow delay topology create`" in found
    assert f"exchange {level} is missing; run `airflow delay topology create`" in found
    assert [text for text in found if text.startswith(f"queue {other} has other arguments (PRECONDITION_FAILED")]
    assert (
        f"{TOPOLOGY.level(0)} is not bound to {rung} by '*.*.*.*.*.1.#'; run `airflow delay topology create`" in found
    )
    refused = delay("topology", "create", *CONN)
    assert (refused.code, "run `airflow delay topology verify`" in refused.err) == (3, True)
    with amqp(vhost_url) as channel:
        channel.queue_delete(other)
    assert delay("topology", "create", *CONN).code == 0
    assert issues(delay, "problem") == []


@pytest.mark.parametrize("kind", ["policies", "operator-policies"])
@pytest.mark.parametrize("definition", [{"message-ttl": 1000}, {"expires": 10_000_000}, {"max-length": 10}], ids=str)
def test_a_policy_that_reaches_the_ladder_is_a_problem(
    delay: CommandLine, vhost_url: str, kind: str, definition: dict[str, int]
) -> None:
    """D18: messages would be early, or gone."""
    delay.document("topology", "create", *CONN)
    vhost, (name,) = urlsplit(vhost_url).path[1:], definition
    policy = {"pattern": ".*", "definition": definition, "apply-to": "queues"}
    manage("PUT", f"{kind}/{vhost}/trap", policy)
    found = issues(delay, "problem")
    assert len(found) == len(list(TOPOLOGY.rungs())) + 3
    assert found[3] == (
        f"a policy sets {name} on queue {TOPOLOGY.rung(60_000)}, so messages may be early or lost;"
        " exclude names that begin with delay.v1 from the policy's pattern"
    )
    manage("PUT", f"{kind}/{vhost}/trap", policy | {"pattern": r"^(?!delay\.v1)"})
    assert issues(delay, "problem") == []


def test_of_several_policies_the_one_that_rabbitmq_applies_counts(delay: CommandLine, vhost_url: str) -> None:
    delay.document("topology", "create", *CONN)
    vhost = urlsplit(vhost_url).path[1:]
    manage("PUT", f"policies/{vhost}/trap", {"pattern": ".*", "definition": {"message-ttl": 1}, "priority": 1})
    assert issues(delay, "problem") != []
    harmless = {"pattern": "^delay", "definition": {"delivery-limit": 5}, "apply-to": "queues", "priority": 2}
    manage("PUT", f"policies/{vhost}/harmless", harmless)
    assert issues(delay, "problem") == []
    exchanges = {"pattern": ".*", "definition": {"alternate-exchange": "x"}, "apply-to": "exchanges", "priority": 3}
    manage("PUT", f"policies/{vhost}/exchanges", exchanges)
    assert issues(delay, "problem") == []


def test_messages_without_a_route_are_a_problem(delay: CommandLine, vhost_url: str) -> None:
    delay.document("topology", "create", *CONN)
    with amqp(vhost_url) as channel:
        channel.confirm_delivery()
        channel.basic_publish(*TOPOLOGY.route("nowhere", 0), b"x")
    assert issues(delay, "problem") == [
        f"1 messages had no route and are parked in queue {UNROUTABLE}; create their channels again, then"
        " run `airflow delay topology replay-parked`"
    ]


def test_advice_is_no_problem(
    delay: CommandLine, vhost_url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    define(monkeypatch, vhost_url, journal_max_age="1D")
    assert delay.document("topology", "create", *CONN)["topology"] == "delay.v1.ladder.60000ms"
    [unseen] = issues(delay, "problem")
    assert "without management_url, messages are reported as dispatched" in unseen
    [unlooked] = issues(delay, "advice")
    assert unlooked.startswith("bindings, policies and stuck queues were not checked; set management_url")
    # Another ladder writes to the same journal and keeps it as it is.
    define(monkeypatch, vhost_url, journal_max_age="2D")
    assert delay("topology", "create", *CONN).code == 0
    assert issues(delay, "problem") == [unseen]
    assert [text for text in issues(delay, "advice") if text.startswith(f"queue {JOURNAL} keeps its records for anot")]


def test_every_kind_of_ladder_is_accepted_by_the_server(
    delay: CommandLine, vhost_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C3, C6: the longest holds of these ticks are close to the longest that RabbitMQ takes."""
    for settings in ({"tick": 0.001}, {"tick": 20.051, "journal": False}):
        connection = connection_of(vhost_url, **settings)
        monkeypatch.setenv("AIRFLOW_CONN_RABBIT", json.dumps(connection))
        assert delay("topology", "create", *CONN).code == 0
        assert [each for each in issues(delay, "problem") if "without management_url" not in each] == []
    ladder = Topology(tick_ms=20_051, journal=False)
    assert ladder.prefix in {name.partition(".rung")[0] for name in names_in(vhost_url, "queues")}


def test_verifying_needs_only_read_access_to_the_management_api(
    delay: CommandLine, vhost_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delay.document("topology", "create", *CONN)
    vhost, parts, name = urlsplit(vhost_url).path[1:], urlsplit(require_management()), f"user-{uuid4().hex[:12]}"
    manage("PUT", f"policies/{vhost}/trap", {"pattern": ".*", "definition": {"message-ttl": 1}})
    manage("PUT", f"users/{name}", {"password": "x", "tags": "management"})
    try:
        manage("PUT", f"permissions/{vhost}/{name}", {"configure": "^$", "write": "^$", "read": "^$"})
        define(monkeypatch, vhost_url, management_url=f"http://{name}:x@{parts.hostname}:{parts.port}")
        assert len(issues(delay, "problem")) == len(list(TOPOLOGY.rungs())) + 3
    finally:
        manage("DELETE", f"users/{name}")


def test_a_management_url_that_does_not_answer_is_named_without_its_password(
    delay: CommandLine, vhost_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delay.document("topology", "create", *CONN)
    parts = urlsplit(require_management())
    define(monkeypatch, vhost_url, management_url=f"http://guest:s3cret@{parts.hostname}:{parts.port}")
    result = delay("topology", "verify", *CONN)
    assert (result.code, result.out) == (3, "")
    assert result.err.startswith("management_url: RabbitMQ at ")
    assert result.err.endswith("does not answer there (401); correct it\n")
    assert "s3cret" not in result.err
