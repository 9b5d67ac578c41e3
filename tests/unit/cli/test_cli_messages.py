"""`airflow delay list`, `show` and `status`."""

from __future__ import annotations

import re
import time
from contextlib import closing
from pathlib import Path

import pytest

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.heartbeats import mark_stopped
from airflow_delay_provider.cli.output import message_fields, preview
from airflow_delay_provider.domain.clock import EPOCH
from airflow_delay_provider.domain.message import Message, Origin
from tests.heartbeats import OWNER, WELL, write_heartbeat
from tests.unit.cli.commandline import CommandLine, parser


@pytest.fixture
def five(delay: CommandLine) -> CommandLine:
    """Three waiting messages and a cancelled one in orders, one in invoices."""
    for number in range(1, 5):
        at = f"2035-01-0{number}T00:00:00Z"
        delay.document("schedule", "orders", "--payload", "x", "--at", at, "--id", f"m{number}")
    delay.document("schedule", "invoices", "--payload", "x", "--at", "2034-01-01T00:00:00Z", "--id", "m5")
    delay.document("cancel", "m4")
    return delay


def ids(document: dict[str, list[dict[str, str]]]) -> list[str]:
    return [message["message_id"] for message in document["messages"]]


def test_messages_are_listed_by_delivery_time(five: CommandLine) -> None:
    """B9, A45: of one channel or of all."""
    assert ids(five.document("list")) == ["m5", "m1", "m2", "m3", "m4"]
    assert ids(five.document("list", "--channel", "orders")) == ["m1", "m2", "m3", "m4"]
    assert ids(five.document("list", "--channel", "nowhere")) == []


@pytest.mark.parametrize("states", [["SCHEDULED"], ["scheduled"], ["100"]])
def test_a_state_is_given_by_name_or_code(five: CommandLine, states: list[str]) -> None:
    """B11, B64."""
    words = [word for state in states for word in ("--state", state)]
    assert ids(five.document("list", "--channel", "orders", *words)) == ["m1", "m2", "m3"]


def test_several_states_can_be_listed_together(five: CommandLine) -> None:
    """B11."""
    assert ids(five.document("list", "--state", "CANCELLED", "--state", "103")) == ["m4"]
    assert len(ids(five.document("list", "--state", "CANCELLED", "--state", "100"))) == 5


def test_pages_go_forward_and_back(five: CommandLine) -> None:
    """B10: each page names the next and the previous one."""
    first = five.document("list", "--limit", "2")
    assert (ids(first), first["prev"]) == (["m5", "m1"], None)
    second = five.document("list", "--limit", "2", "--page", first["next"])
    assert ids(second) == ["m2", "m3"]
    third = five.document("list", "--limit", "2", "--page", second["next"])
    assert (ids(third), third["next"]) == (["m4"], None)
    assert ids(five.document("list", "--limit", "2", "--page", third["prev"])) == ["m2", "m3"]


def test_the_table_shows_every_id_whole_and_the_next_page(five: CommandLine) -> None:
    """B10: without a terminal nothing is cut."""
    long_id = "i" * 255
    five.document("schedule", "orders", "--payload", "x", "--at", "2033-01-01T00:00:00Z", "--id", long_id)
    result = five("list", "--limit", "1")
    assert result.code == 0
    assert long_id in result.out
    token = result.out.splitlines()[-1].removeprefix("next: --page ")
    assert ids(five.document("list", "--limit", "1", "--page", token)) == ["m5"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["list", "--state", "LOST"], "state: 'LOST' is unknown; use one of SCHEDULED (100)"),
        (["list", "--state", "999"], "state: '999' is unknown; use one of SCHEDULED (100)"),
        (["list", "--limit", "0"], "limit: '0' is not a whole number of at least 1; use"),
        (["list", "--limit", "many"], "limit: 'many' is not a whole number of at least 1; use"),
        (["list", "--limit", "5000"], "limit: 5000 is not a page size; use 1 to 1000"),
        (["list", "--page", "garbage"], "page: 'garbage' is not a page token; use one that a listing printed"),
        (["list", "--channel", "a b"], "channel: 'a b' is not a valid channel name; use"),
        (["status", "--channel", "a b"], "channel: 'a b' is not a valid channel name; use"),
        (["show", "\udcff"], "--id (message_id): '\\udcff' is not a valid id; use"),
    ],
)
def test_bad_input_is_code_2(delay: CommandLine, words: list[str], problem: str) -> None:
    """B3."""
    result = delay(*words)
    assert result.code == 2
    assert result.err.startswith(problem)


def test_a_message_is_shown_with_its_history(five: CommandLine) -> None:
    """B12: every field of the record, and what happened to it."""
    five.document("reschedule", "m1", "--at", "2035-02-01T00:00:00Z")
    shown = five.document("show", "m1")
    assert [(entry["change"], entry["deliver_at"]) for entry in shown["history"]] == [
        ("scheduled", "2035-01-01T00:00:00.000Z"),
        ("rescheduled", "2035-02-01T00:00:00.000Z"),
    ]
    assert (shown["payload_bytes"], shown["payload_preview"], shown["origin"]) == (1, "x", None)
    assert "payload" not in shown
    table = five("show", "m1").out
    assert "state             SCHEDULED" in table
    assert "rescheduled" in table


def test_a_dispatched_message_shows_its_lateness(delay: CommandLine) -> None:
    """B41: how long after its time."""
    delay.document("schedule", "orders", "--payload", "x", "--at", "2001-01-01T00:00:00Z", "--id", "m1")
    shown = delay.document("show", "m1")
    assert (shown["state"], shown["state_code"]) == ("DISPATCHED", 101)
    assert shown["lateness_seconds"] > 86_400 * 365
    assert shown["dispatched_at"].endswith("Z")


def test_an_unknown_message_is_code_1(delay: CommandLine) -> None:
    """B13."""
    result = delay("show", "nobody")
    assert result.code == 1
    assert result.err == "message 'nobody' is not known; `airflow delay list` shows the known messages\n"


def test_the_payload_can_be_written_byte_for_byte(
    monkeypatch: pytest.MonkeyPatch, sqlite_url: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", sqlite_url)
    data = bytes(range(256))
    (tmp_path / "data").write_bytes(data)
    for words in (
        ["schedule", "orders", "--payload-file", str(tmp_path / "data"), "--after", "60", "--id", "m1"],
        ["show", "m1", "--payload"],
    ):
        capfdbinary.readouterr()
        args = parser().parse_args(["delay", *words])
        args.func(args)
    assert capfdbinary.readouterr().out == data


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b"short", "short"),
        (b"x" * 100, "x" * 60 + "…"),
        ("ü".encode() * 100, "ü" * 60 + "…"),
        ("\N{GRINNING FACE}".encode() * 61, "\N{GRINNING FACE}" * 60),
        (b"a\x1b[31mb\nc", "a\\x1b[31mb\\nc"),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
        (b"", ""),
    ],
)
def test_a_preview_is_short_and_cannot_steer_the_terminal(payload: bytes, shown: str) -> None:
    assert preview(payload).startswith(shown)
    assert len(preview(payload)) <= 61 or b"\x1b" in payload


def test_the_origin_of_a_message_is_shown() -> None:
    origin = Origin(dag_id="d", run_id="r", task_id="t", map_index=3)
    message = Message(channel="c", payload=b"", deliver_at=EPOCH, origin=origin)
    assert message_fields(message)["origin"] == {"dag_id": "d", "run_id": "r", "task_id": "t", "map_index": 3}


def test_status_counts_each_state_of_each_channel_and_names_what_is_next(five: CommandLine) -> None:
    """B14, B15, B49."""
    status = five.document("status")
    assert status["counts"] == {"SCHEDULED": 4, "DISPATCHED": 0, "CANCELLED": 1, "DEAD": 0}
    assert (status["next_due"], status["overdue_seconds"]) == ("2034-01-01T00:00:00.000Z", 0.0)
    assert [(row["channel"], row["counts"]["SCHEDULED"], row["next_due"]) for row in status["channels"]] == [
        ("invoices", 1, "2034-01-01T00:00:00.000Z"),
        ("orders", 3, "2035-01-01T00:00:00.000Z"),
    ]
    one = five.document("status", "--channel", "orders")
    assert (one["counts"]["CANCELLED"], one["next_due"]) == (1, "2035-01-01T00:00:00.000Z")


def test_status_of_an_empty_ledger_has_nothing_next(delay: CommandLine) -> None:
    """B15."""
    status = delay.document("status")
    assert status.pop("warning").startswith("no dispatcher has ever been seen in this ledger")
    assert status == {
        "counts": {"SCHEDULED": 0, "DISPATCHED": 0, "CANCELLED": 0, "DEAD": 0},
        "next_due": None,
        "overdue_seconds": None,
        "in_channel": None,
        "channels": [],
        "dispatchers": [],
    }


def test_status_counts_what_waits_for_consumers_in_embedded_channels(five: CommandLine, sqlite_url: str) -> None:
    for number in range(3):
        five.document("send", "orders", "--payload", str(number))
    with closing(Ledger(sqlite_url)) as ledger:
        broker = EmbeddedBroker(ledger)
        handled, _ = broker.receive("orders", limit=2)
        broker.ack([handled])
    status = five.document("status")
    assert {row["channel"]: row["in_channel"] for row in status["channels"]} == {"orders": 2, "invoices": 0}
    assert (status["in_channel"], status["counts"]["DISPATCHED"]) == (2, 3)
    assert five.document("status", "--channel", "invoices")["in_channel"] == 0
    assert " in_channel " in five("status").out


def test_status_says_how_long_the_first_message_is_overdue(five: CommandLine) -> None:
    """B41: overdue messages show that no dispatcher runs."""
    five.document("expedite", "m3")
    time.sleep(0.005)
    assert five.document("status")["overdue_seconds"] > 0
    invoices, orders, both = (line.split() for line in five("status").out.splitlines()[-3:])
    assert (invoices[0], orders[0], both[0]) == ("invoices", "orders", "(all)")
    assert float(invoices[-1]) == 0 < float(orders[-1])


def test_status_shows_which_dispatchers_run(delay: CommandLine, sqlite_url: str) -> None:
    """B41"""
    with closing(Ledger(sqlite_url)) as ledger:
        write_heartbeat(
            ledger, kafka_connections=["kafka"], loops={"dispatch_embedded": WELL, "dispatch_to_brokers:rabbit": WELL}
        )
        status = delay.document("status")
        table = delay("status")
        ledger.transact(lambda c: mark_stopped(c, OWNER))
        stopped = delay("status")
    assert status["warning"] is None
    [dispatcher] = status["dispatchers"]
    assert (dispatcher["owner"], dispatcher["status"], dispatcher["pid"]) == (OWNER, "alive", 4711)
    assert (dispatcher["kafka_connections"], dispatcher["destinations"]) == (["kafka"], ["rabbit"])
    assert [loop["name"] for loop in dispatcher["loops"]] == ["dispatch_embedded", "dispatch_to_brokers:rabbit"]
    assert "ledger, --kafka kafka, sends to rabbit" in table.out.splitlines()[-1]
    assert table.err == ""
    assert " stopped " in stopped.out.splitlines()[-1]
    assert re.search(
        r"^warning: no dispatcher has been seen since .* UTC \(host-1:4711:abcdef was stopped", stopped.err
    )
    assert "start one with `airflow delay dispatcher`" in stopped.err


def test_status_shows_a_dispatcher_that_runs_and_does_not_work(delay: CommandLine, sqlite_url: str) -> None:
    """B41"""
    failing = {**WELL, "well": False, "failures": 3, "error": "LedgerError: the disk is full"}
    with closing(Ledger(sqlite_url)) as ledger:
        write_heartbeat(ledger, loops={"dispatch_embedded": failing})
    shown = delay("status")
    assert " unwell " in shown.out.splitlines()[-1]
    assert "its loop dispatch_embedded failed 3 times since" in shown.err
    assert "the disk is full" in shown.err
    assert "start one" not in shown.err
