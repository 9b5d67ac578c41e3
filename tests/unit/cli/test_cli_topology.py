"""`airflow delay topology` as a command: what it asks of a broker, what it prints, how it ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.port import HasTopology, KeepsUndelivered, TopologyIssue
from airflow_delay_provider.domain.exceptions import MessagesWaitError
from airflow_delay_provider.hooks import connections
from tests.unit.cli.commandline import CommandLine

ADVICE = TopologyIssue(text="could be better", is_problem=False)
PROBLEM = TopologyIssue(text="is broken; mend it")


class Built(EmbeddedBroker, HasTopology, KeepsUndelivered):
    """Stands for a broker that needs objects of its own."""

    issues: Sequence[TopologyIssue] = ()
    asked: list[object]

    def create_topology(self, channels: Sequence[str] = ()) -> str:
        self.asked.append(["create", *channels])
        return "delay.v1.built"

    def require_topology(self) -> None:
        self.asked.append(["require"])

    def verify_topology(self) -> list[TopologyIssue]:
        return list(self.issues)

    def delete_topology(self, *, even_if_messages_wait: bool = False) -> str:
        if not even_if_messages_wait:
            raise MessagesWaitError("3 messages wait and would be lost; add --force to lose them")
        self.asked.append("delete")
        return "delay.v1.built"

    def count_refused(self) -> Mapping[str, int] | None:
        return {"full": 4}

    def count_parked(self) -> int:
        return 3

    def count_parked_by_channel(self) -> Mapping[str, int]:
        return {"orders": 2, "gone": 1}

    def replay_parked(self, channels: Sequence[str] = ()) -> Mapping[str, int]:
        self.asked.append(["replay", *channels])
        return {"orders": 2}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, sqlite_url: str) -> type[Built]:
    """The broker of the connection ``far``, whose messages the ledger holds."""

    class Fresh(Built):
        asked: list[object] = []  # noqa: RUF012 - one for each test

    monkeypatch.setitem(connections._BROKERS, "built", lambda _connection, _clock: Fresh(Ledger(sqlite_url)))
    monkeypatch.setenv("AIRFLOW_CONN_FAR", json.dumps({"conn_type": "built", "extra": {"hold": "ledger"}}))
    return Fresh


def test_create_prepares_channels(delay: CommandLine, built: type[Built]) -> None:
    words = ["topology", "create", "--conn-id", "far"]
    assert delay.document(*words) == {"topology": "delay.v1.built", "channels": []}
    shown = delay(*words, "--channel", "orders", "--channel", "events:order.created")
    assert (shown.code, shown.out.split()) == (
        0,
        ["topology", "delay.v1.built", "channels", "orders,", "events:order.created"],
    )
    assert built.asked == [["create"], ["create", "orders", "events:order.created"]]


@pytest.mark.parametrize(
    ("issues", "code", "problems"), [((), 0, 0), ((ADVICE,), 0, 0), ((ADVICE, PROBLEM), 1, 1)], ids=str
)
def test_verify_exits_with_one_only_if_there_is_a_problem(
    delay: CommandLine, built: type[Built], issues: Sequence[TopologyIssue], code: int, problems: int
) -> None:
    built.issues = issues
    result = delay("topology", "verify", "--conn-id", "far", "--output", "json")
    assert result.code == code
    assert result.document["problems"] == problems
    assert [each["text"] for each in result.document["issues"]] == [issue.text for issue in issues]
    shown = delay("topology", "verify", "--conn-id", "far")
    assert shown.code == code
    assert shown.out.splitlines()[0].split() == ["problems", str(problems)]
    assert all(issue.text in shown.out for issue in issues)
    assert ("problem " in shown.out) == (problems > 0)


def test_delete_must_be_confirmed_and_forced(delay: CommandLine, built: type[Built]) -> None:
    words = ["topology", "delete", "--conn-id", "far"]
    unconfirmed = delay(*words, "--force")
    assert unconfirmed.code == 2
    assert unconfirmed.err == ("This deletes the queues or topics that hold delayed messages. Pass --yes to confirm.\n")
    refused = delay(*words, "--yes")
    assert (refused.code, refused.err) == (1, "3 messages wait and would be lost; add --force to lose them\n")
    assert built.asked == []
    assert delay.document(*words, "--yes", "--force") == {"topology": "delay.v1.built", "deleted": True}
    assert built.asked == ["delete"]


def test_parked_messages_are_counted_and_replayed_only_when_that_is_confirmed(
    delay: CommandLine, built: type[Built]
) -> None:
    words = ["topology", "replay-parked", "--conn-id", "far"]
    unconfirmed = delay(*words)
    assert unconfirmed.code == 2
    assert unconfirmed.err == "This sends 3 messages to their channels. Pass --yes to confirm.\n"
    assert unconfirmed.out.count("orders") == 1
    assert built.asked == []
    assert delay.document(*words, "--yes") == {
        "channels": [
            {"channel": "gone", "parked": 1, "replayed": 0},
            {"channel": "orders", "parked": 2, "replayed": 2},
        ]
    }
    [row] = delay.document(*words, "--yes", "--channel", "orders")["channels"]
    assert row == {"channel": "orders", "parked": 2, "replayed": 2}
    assert built.asked == [["replay"], ["replay", "orders"]]


def test_status_counts_refused_and_parked_messages(delay: CommandLine, built: type[Built]) -> None:
    assert built.asked == []
    shown = delay.document("status", "--conn-id", "far")
    assert (shown["refused"], shown["parked"]) == ({"full": 4}, 3)
    one = delay.document("status", "--conn-id", "far", "--channel", "gone")
    assert (one["refused"], one["parked"]) == ({}, 3)
    assert "4 for full" in delay("status", "--conn-id", "far").out


@pytest.mark.parametrize("words", [["create"], ["verify"], ["delete", "--yes"], ["replay-parked"]])
def test_a_broker_without_topology_is_refused(delay: CommandLine, words: list[str]) -> None:
    result = delay("topology", *words)
    assert (result.code, result.out) == (3, "")
    assert result.err == (
        "--conn-id (delay_conn_id): the broker of connection 'delay_default' needs no topology;"
        " use a rabbitmq, delay_kafka or kafka connection\n"
    )
