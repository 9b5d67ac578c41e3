"""`airflow delay` on SQLite and on PostgreSQL: the whole way of a message, and outages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.migrations import HEAD
from airflow_delay_provider.brokers.port import Broker, Receipt
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.domain.message import Message
from tests.databases import execute
from tests.unit.cli.commandline import CommandLine


@pytest.fixture
def delay(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ledger_url: str) -> CommandLine:
    """`airflow delay` on a fresh ledger, once on each database."""
    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", ledger_url)
    return CommandLine(capfd)


def dispatch_embedded(ledger_url: str) -> None:
    """What a dispatcher does."""
    from airflow_delay_provider.dispatcher.dispatch_embedded import DispatchEmbedded
    from airflow_delay_provider.dispatcher.loop import Context
    from airflow_delay_provider.dispatcher.options import DispatcherConfig

    ledger = Ledger(ledger_url)
    DispatchEmbedded(
        Context(ledger=ledger, clock=SystemClock(), config=DispatcherConfig(), observers=[], bucket=None)
    ).run_once()
    ledger.close()


def test_a_message_from_schedule_to_delivery(delay: CommandLine, ledger_url: str) -> None:
    """B51: scheduled, listed, counted, delivered, and its state has changed."""
    delay.document("schedule", "orders", "--payload", "x", "--after", "3600", "--id", "m1", "--header", "a=1")
    (listed,) = delay.document("list", "--channel", "orders", "--state", "SCHEDULED")["messages"]
    assert (listed["message_id"], listed["headers"]) == ("m1", {"a": "1"})
    assert delay.counts()["SCHEDULED"] == 1
    delay.document("expedite", "m1")
    dispatch_embedded(ledger_url)
    (received,) = delay("consume", "orders", "--limit", "1", "--timeout", "20").lines
    assert (received["message_id"], received["payload"]) == ("m1", "x")
    assert delay.counts() == {"SCHEDULED": 0, "DISPATCHED": 1, "CANCELLED": 0, "DEAD": 0}
    history = [entry["change"] for entry in delay.document("show", "m1")["history"]]
    assert history == ["scheduled", "expedited", "dispatched"]


def test_a_large_file_is_scheduled_again_without_duplicates(delay: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps({"payload": n, "deliver_after": 3600}) + "\n" for n in range(5000)))
    assert delay.document("schedule", "orders", "--file", str(file))["scheduled"] == 5000
    assert delay.document("schedule", "orders", "--file", str(file))["kept"] == 5000
    assert delay.counts()["SCHEDULED"] == 5000


def test_pages_of_many_messages_leave_none_out(delay: CommandLine, tmp_path: Path) -> None:
    """B10: all of the same time, in two states."""
    file = tmp_path / "many.jsonl"
    at = "2035-01-31T17:00:00Z"
    lines = (json.dumps({"payload": "x", "deliver_at": at, "message_id": f"m{n}"}) for n in range(250))
    file.write_text("\n".join(lines))
    delay.document("schedule", "orders", "--file", str(file))
    delay.document("cancel", *(f"m{n}" for n in range(0, 250, 3)))
    seen: list[str] = []
    token: str | None = None
    while token is not None or not seen:
        page = delay.document("list", "--limit", "40", *(["--page", token] if token else []))
        seen += [message["message_id"] for message in page["messages"]]
        token = page["next"]
    assert sorted(seen) == sorted(f"m{n}" for n in range(250))


def test_a_database_without_tables_is_named_with_the_remedy(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, empty_postgres_url: str
) -> None:
    """B42: PostgreSQL is migrated only when asked."""
    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", empty_postgres_url)
    delay = CommandLine(capfd)
    for words in (["schedule", "orders", "--payload", "x"], ["status"], ["db", "check"], ["dispatcher"]):
        result = delay(*words)
        assert (result.code, "run `airflow delay db migrate`" in result.err) == (3, True), words
    assert delay.document("db", "migrate")["revision"] == HEAD
    assert delay("schedule", "orders", "--payload", "x").code == 0
    assert delay.document("db", "downgrade", "--yes")["revision"] is None
    assert delay("status").code == 3


def test_a_database_lost_on_the_way_leaves_a_file_that_can_be_continued(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, postgres_url: str, tmp_path: Path
) -> None:
    """B34: the tables vanish behind the second chunk, come back, and the same command finishes the work."""
    from airflow_delay_provider.cli import bulk

    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", postgres_url)
    delay = CommandLine(capfd)
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps({"payload": n, "deliver_after": 3600}) + "\n" for n in range(3500)))
    chunks = 0

    def lose_the_database(broker: Broker, messages: Sequence[Message], *, on_conflict: OnConflict) -> list[Receipt]:
        nonlocal chunks
        chunks += 1
        receipts = broker.schedule(messages, on_conflict=on_conflict)
        if chunks == 2:
            execute(postgres_url, "ALTER TABLE delay_scheduled_message RENAME TO lost")
        return receipts

    with monkeypatch.context() as patch:
        patch.setattr(bulk, "schedule_and_count", lose_the_database)
        result = delay("schedule", "orders", "--file", str(file))
    assert result.code == 3
    assert f"{file}: 2000 messages up to line 2000 are confirmed, then: the ledger at " in result.err
    assert result.err.endswith("repeat the command to continue\n")
    execute(postgres_url, "ALTER TABLE lost RENAME TO delay_scheduled_message")
    done = delay.document("schedule", "orders", "--file", str(file))
    assert (done["kept"], done["scheduled"]) == (2000, 1500)
