"""`airflow delay list`, `show` and `status` of a connection whose broker holds messages itself."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from airflow_delay_provider.brokers.ledger import projection
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change, JournalEntry
from airflow_delay_provider.domain.message import Message
from tests.unit.cli.commandline import CommandLine

HELD = Message(id="held", channel="orders", payload=b"hello", deliver_at=datetime(2034, 1, 1, tzinfo=UTC))


@pytest.fixture
def rabbit(delay: CommandLine, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """Connection `rabbit` has a broker without a ledger; the ledger has a message of its own."""
    from airflow_delay_provider.hooks.delay import DelayHook

    real = DelayHook.get_conn
    broker = SimpleNamespace(ledger=None, clock=SystemClock(), close=lambda: None)
    monkeypatch.setattr(DelayHook, "get_conn", lambda hook: broker if hook.delay_conn_id == "rabbit" else real(hook))
    delay.document("schedule", "orders", "--payload", "x", "--at", "2033-01-01T00:00:00Z", "--id", "own")
    return delay


def follow(url: str) -> None:
    entry = JournalEntry(
        message_id=HELD.id,
        change=Change.SCHEDULED,
        at=HELD.deliver_at - timedelta(days=1),
        channel=HELD.channel,
        deliver_at=HELD.deliver_at,
        position="1",
        message=HELD,
    )
    ledger = Ledger(url)
    ledger.transact(lambda c: projection.project(c, "rabbit", [entry], after=FROM_THE_START, position="1"))
    ledger.close()


def test_only_messages_of_the_connection_are_listed_counted_and_shown(rabbit: CommandLine, sqlite_url: str) -> None:
    """A45, B9, B12, B14, B15"""
    follow(sqlite_url)
    [listed] = rabbit.document("list", "--conn-id", "rabbit")["messages"]
    assert (listed["message_id"], listed["destination"], listed["hold"]) == ("held", "rabbit", "broker")
    status = rabbit.document("status", "--conn-id", "rabbit")
    assert (status["counts"]["SCHEDULED"], status["next_due"]) == (1, "2034-01-01T00:00:00.000Z")
    assert [row["channel"] for row in status["channels"]] == ["orders"]
    one = rabbit.document("status", "--conn-id", "rabbit", "--channel", "orders")
    assert (one["counts"]["SCHEDULED"], one["next_due"]) == (1, "2034-01-01T00:00:00.000Z")
    shown = rabbit.document("show", "held", "--payload", "--conn-id", "rabbit")
    assert (shown["payload"], [entry["change"] for entry in shown["history"]]) == ("hello", ["scheduled"])
    assert rabbit("show", "own", "--conn-id", "rabbit").code == 1
    assert rabbit("list", "--conn-id", "rabbit").err == ""


def test_the_ledger_itself_lists_all(rabbit: CommandLine, sqlite_url: str) -> None:
    """B14"""
    follow(sqlite_url)
    assert [(m["message_id"], m["hold"]) for m in rabbit.document("list")["messages"]] == [
        ("own", "ledger"),
        ("held", "broker"),
    ]
    assert rabbit.counts()["SCHEDULED"] == 2


def test_a_message_that_the_broker_holds_cannot_be_cancelled_in_the_ledger(
    rabbit: CommandLine, sqlite_url: str
) -> None:
    """A27"""
    follow(sqlite_url)
    result = rabbit("cancel", "held")
    assert result.code == 1
    assert "is held by the broker of connection 'rabbit'" in result.err
    assert 'hold="ledger"' in result.err


@pytest.mark.parametrize("words", [["list"], ["status"]])
def test_a_missing_index_is_reported_beside_an_empty_list(rabbit: CommandLine, words: list[str]) -> None:
    result = rabbit(*words, "--conn-id", "rabbit", "--output", "json")
    assert result.code == 0
    assert result.document.get("messages", result.document.get("channels")) == []
    assert "run `airflow delay dispatcher --index rabbit`" in result.err
