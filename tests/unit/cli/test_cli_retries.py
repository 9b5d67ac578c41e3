"""`airflow delay retries`: list the tickets of Spark tasks, expedite them and give them up."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from airflow_delay_provider.brokers.ledger import delivery, projection, scheduling
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change, JournalEntry
from airflow_delay_provider.domain.message import Message, Origin
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, Ticket, WaitsFor
from tests.unit.cli.commandline import CommandLine, parser

START = datetime(2035, 1, 31, 17, tzinfo=UTC)
RUN_ID = "scheduled__2035-01-31T00:00:00+00:00"
REASON = "Connection refused: the database of the source did not answer, although it was asked three times"
FILTERS: dict[str, str] = {"--dag-id": "sales", "--run-id": RUN_ID, "--task-id": "load", "--map-index": "1"}


def ticket(number: int = 0, *, map_index: int = -1, task_id: str = "load", **options: Any) -> Ticket:
    """The ticket that is due so many minutes after the start."""
    known: dict[str, Any] = {
        "origin": Origin(dag_id="sales", run_id=RUN_ID, task_id=task_id, map_index=map_index),
        "began_at": START - timedelta(hours=1),
        "attempt": 2,
        "verdict": "transient",
        "reason": REASON,
        "cluster": "spark://127.0.0.1:7077",
        "deliver_at": START + timedelta(minutes=number),
    }
    return Ticket(**known | options)


@pytest.fixture
def delay(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ledger_url: str) -> CommandLine:
    """`airflow delay` on a fresh ledger, once on each database."""
    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", ledger_url)
    return CommandLine(capfd)


@pytest.fixture
def broker(ledger_url: str) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(Ledger(ledger_url)) as opened:
        yield opened


@pytest.fixture
def tickets(broker: EmbeddedBroker) -> list[Ticket]:
    """Three tickets of a mapped task and one of another DAG, in due order."""
    other = Origin(dag_id="stock", run_id="manual__1", task_id="count")
    made = [*(ticket(n, map_index=n) for n in range(3)), ticket(3, origin=other)]
    broker.schedule([each.as_message(DEFAULT_CHANNEL) for each in reversed(made)])
    return made


def ids(document: dict[str, Any]) -> list[str]:
    return [each["message_id"] for each in document["retries"]]


def dispatch(broker: EmbeddedBroker, item: Ticket) -> None:
    """What a dispatcher does when the time has come."""
    due_ms = int(item.deliver_at.timestamp() * 1000)
    broker.ledger.transact(lambda connection: delivery.deliver_due(connection, now_ms=due_ms, limit=1))


# -- listing -------------------------------------------------------------------------------------------------------


def test_a_ticket_names_the_waiting_task_the_attempt_and_the_reason(delay: CommandLine, broker: EmbeddedBroker) -> None:
    waiting = ticket(map_index=7).extended(START, WaitsFor.CLUSTER)
    broker.schedule([waiting.as_message(DEFAULT_CHANNEL)])
    assert delay.document("retries") == {
        "retries": [
            {
                "dag_id": "sales",
                "run_id": RUN_ID,
                "task_id": "load",
                "map_index": 7,
                "attempt": 2,
                "verdict": "transient",
                "reason": REASON,
                "waits_for": "cluster",
                "extensions": 1,
                "cluster": "spark://127.0.0.1:7077",
                "began_at": "2035-01-31T16:00:00.000Z",
                "next_try": "2035-01-31T17:00:00.000Z",
                "message_id": waiting.id,
            }
        ],
        "next": None,
        "prev": None,
    }


def test_only_scheduled_tickets_are_listed_by_delivery_time(
    delay: CommandLine, broker: EmbeddedBroker, tickets: list[Ticket]
) -> None:
    assert ids(delay.document("retries")) == [each.id for each in tickets]
    dispatch(broker, tickets[0])
    broker.cancel([tickets[2].id])
    assert ids(delay.document("retries")) == [tickets[1].id, tickets[3].id]


def test_a_rescheduled_ticket_shows_its_new_time(
    delay: CommandLine, broker: EmbeddedBroker, tickets: list[Ticket]
) -> None:
    broker.reschedule([tickets[0].id], START + timedelta(days=1))
    last = delay.document("retries")["retries"][-1]
    assert (last["message_id"], last["next_try"]) == (tickets[0].id, "2035-02-01T17:00:00.000Z")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--dag-id", "sales"], [0, 1, 2]),
        (["--dag-id", "stock"], [3]),
        (["--run-id", "manual__1"], [3]),
        (["--task-id", "load"], [0, 1, 2]),
        (["--map-index", "1"], [1]),
        (["--map-index", "-1"], [3]),
        ([word for pair in FILTERS.items() for word in pair], [1]),
        (["--dag-id", "stock", "--task-id", "load"], []),
        (["--dag-id", "nobody's"], []),
        (["--channel", "elsewhere"], []),
    ],
)
def test_filters_select_tickets(delay: CommandLine, tickets: list[Ticket], words: list[str], found: list[int]) -> None:
    assert ids(delay.document("retries", *words)) == [tickets[n].id for n in found]


def test_pages_of_a_filter_leave_none_out_both_ways(delay: CommandLine, broker: EmbeddedBroker) -> None:
    """Tickets of another task, and some due at the same moment, lie in between."""
    mixed = [ticket(n // 3, map_index=n, task_id="load" if n % 2 else "clean") for n in range(21)]
    broker.schedule([each.as_message(DEFAULT_CHANNEL) for each in mixed])
    words = ["retries", "--task-id", "load", "--limit", "3"]
    page = delay.document(*words)
    forth = [page]
    while page["next"]:
        forth.append(page := delay.document(*words, "--page", page["next"]))
    assert [message_id for each in forth for message_id in ids(each)] == [each.id for each in mixed[1::2]]
    back = [page]
    while page["prev"]:
        back.append(page := delay.document(*words, "--page", page["prev"]))
    assert [ids(each) for each in back] == [ids(each) for each in forth[::-1]]


def test_other_messages_are_listed_with_empty_fields(delay: CommandLine) -> None:
    for payload in ("not JSON", "[]", '{"attempt": 3}'):
        delay.document("schedule", DEFAULT_CHANNEL, "--payload", payload, "--at", START.isoformat())
    listed = delay.document("retries")["retries"]
    assert len(listed) == 3
    for each in listed:
        assert {name for name, value in each.items() if value is not None} == {"next_try", "message_id"}
    shown = delay("retries")
    assert shown.code == 0
    assert all(each["message_id"] in shown.out for each in listed)


def test_the_table_stays_narrow_and_names_the_next_page(delay: CommandLine, tickets: list[Ticket]) -> None:
    shown = delay("retries", "--limit", "1")
    assert shown.code == 0
    header, _, row, following = shown.out.splitlines()
    assert header.split()[::2] == [
        *("next_try", "task", "run_id", "attempt", "verdict", "waits_for", "reason", "message_id")
    ]
    cells = [cell.strip() for cell in row.split("│")]
    assert cells == [
        "2035-01-31 17:00:00Z",
        "sales.load[0]",
        RUN_ID,
        "2",
        "transient",
        "backoff",
        "Connection refused: the database of …",
        tickets[0].id,
    ]
    assert len(row) <= 200
    assert ids(delay.document("retries", "--limit", "1", *following.split()[1:])) == [tickets[1].id]


def test_the_table_shows_how_often_a_ticket_was_extended(delay: CommandLine, broker: EmbeddedBroker) -> None:
    waiting = ticket().extended(START, WaitsFor.CLUSTER).extended(START, WaitsFor.RATE_LIMIT)
    broker.schedule([waiting.as_message(DEFAULT_CHANNEL)])
    row = delay("retries").out.splitlines()[-1]
    assert [cell.strip() for cell in row.split("│")][1:6] == ["sales.load", RUN_ID, "2", "transient", "rate_limit +2"]


@pytest.mark.usefixtures("delay", "tickets")
def test_a_terminal_of_120_columns_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long cells continue in the next line; short ones and the words of the header are never broken."""
    reading, writing = os.openpty()
    args = parser().parse_args(["delay", "retries", "--limit", "1"])
    with os.fdopen(writing, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", terminal)
        patched.setenv("COLUMNS", "120")
        patched.setenv("TERM", "xterm")
        args.func(args)
        terminal.flush()
        lines = re.sub(r"\x1b\[[\d;]*m", "", os.read(reading, 100_000).decode()).splitlines()
    os.close(reading)
    assert max(len(line) for line in lines) <= 120
    assert {"next_try", "attempt", "verdict", "waits_for"} <= set(lines[0].split())
    assert {"2035-01-31", "2", "transient", "backoff"} <= set(lines[2].split())


# -- changing ------------------------------------------------------------------------------------------------------


def test_expedited_tickets_are_due_now(delay: CommandLine, broker: EmbeddedBroker, tickets: list[Ticket]) -> None:
    done = delay.document("retries", "--dag-id", "sales", "--map-index", "1", "--expedite")
    assert done == {"change": "expedited", "message_ids": [tickets[1].id], "too_late": []}
    first = delay.document("retries")["retries"][0]
    assert first["message_id"] == tickets[1].id
    assert datetime.fromisoformat(first["next_try"]) <= broker.clock.now()
    assert first["attempt"] == 2
    assert delay.counts()["SCHEDULED"] == 4


def test_tickets_that_are_given_up_are_cancelled(delay: CommandLine, tickets: list[Ticket]) -> None:
    done = delay.document("retries", "--dag-id", "sales", "--give-up", "--yes")
    assert done == {"change": "cancelled", "message_ids": [each.id for each in tickets[:3]], "too_late": []}
    assert ids(delay.document("retries")) == [tickets[3].id]
    assert delay.document("show", tickets[0].id)["state"] == "CANCELLED"


@pytest.mark.parametrize("words", [["--expedite"], ["--give-up", "--yes"]])
def test_tickets_may_be_named_by_their_ids(delay: CommandLine, tickets: list[Ticket], words: list[str]) -> None:
    named = [tickets[2].id, tickets[0].id]
    assert delay.document("retries", *named, named[0], *words)["message_ids"] == named
    changed = [delay.document("show", each.id)["history"][-1]["change"] for each in tickets]
    assert [change != "scheduled" for change in changed] == [True, False, True, False]


def test_all_means_those_of_every_page(delay: CommandLine, broker: EmbeddedBroker) -> None:
    many = [ticket(n, map_index=n).as_message(DEFAULT_CHANNEL) for n in range(1500)]
    broker.schedule(many)
    delay.document("schedule", "orders", "--payload", "x", "--at", START.isoformat())
    assert delay.document("retries", "--all", "--give-up", "--yes")["message_ids"] == [each.id for each in many]
    assert delay.counts() == {"SCHEDULED": 1, "DISPATCHED": 0, "CANCELLED": 1500, "DEAD": 0}
    assert delay.document("retries", "--all", "--give-up", "--yes")["message_ids"] == []


def test_the_table_names_what_was_changed(delay: CommandLine, tickets: list[Ticket]) -> None:
    shown = delay("retries", "--run-id", "manual__1", "--expedite")
    assert shown.code == 0
    assert shown.out.splitlines()[-1].split() == [tickets[3].id, "│", "expedited"]


def test_a_ticket_that_was_dispatched_is_too_late_to_be_given_up(
    delay: CommandLine, broker: EmbeddedBroker, tickets: list[Ticket]
) -> None:
    """Code 1, and the others are still given up."""
    dispatch(broker, tickets[0])
    named = [tickets[0].id, tickets[1].id]
    result = delay("retries", *named, "--give-up", "--yes", "--output", "json")
    assert result.code == 1
    assert result.document == {"change": "cancelled", "message_ids": [named[1]], "too_late": [named[0]]}
    shown = delay("retries", *named, "--give-up", "--yes")
    assert shown.code == 1
    assert shown.out.splitlines()[-1].split() == [named[0], "│", "too", "late"]


def test_expediting_a_dispatched_ticket_changes_none(
    delay: CommandLine, broker: EmbeddedBroker, tickets: list[Ticket]
) -> None:
    dispatch(broker, tickets[0])
    result = delay("retries", tickets[1].id, tickets[0].id, "--expedite")
    assert (result.code, result.out) == (1, "")
    assert f"message '{tickets[0].id}' is DISPATCHED and cannot be expedited any more" in result.err
    assert [each["change"] for each in delay.document("show", tickets[1].id)["history"]] == ["scheduled"]


@pytest.mark.parametrize("words", [["--expedite"], ["--give-up", "--yes"]])
def test_an_unknown_ticket_changes_none(delay: CommandLine, tickets: list[Ticket], words: list[str]) -> None:
    result = delay("retries", tickets[0].id, "nobody", *words)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("message 'nobody' is not known")
    assert len(ids(delay.document("retries"))) == 4


UNCLEAR = "ids: no clear selection of tickets; give either ids, or filters such as --dag-id, or --all"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--expedite"], UNCLEAR),
        (["--give-up", "--yes"], UNCLEAR),
        (["some-id", "--dag-id", "sales", "--expedite"], UNCLEAR),
        (["some-id", "--all", "--expedite"], UNCLEAR),
        (["--all", "--dag-id", "sales", "--expedite"], UNCLEAR),
        (["--all", "--expedite", "--give-up", "--yes"], "expedite: cannot be combined with --give-up; give only one"),
        (["--all", "--give-up"], "This fails the selected tasks. Pass --yes to confirm."),
        (["--all", "--expedite", "--limit", "5"], "limit: applies to the list only; leave out"),
        (["--all", "--expedite", "--page", "x"], "limit: applies to the list only; leave out"),
        (["\udcff", "--expedite"], "--id (message_id): '\\udcff' is not a valid id; use"),
        (["some-id"], "ids: no action is given; add --expedite or --give-up, or use"),
        (["--dag-id", "\udcff"], "dag_id: '\\udcff' is not a name; use"),
        (["--map-index", "one"], "map_index: 'one' is not an index; use"),
        (["--map-index", "-2"], "map_index: '-2' is not an index; use"),
        (["--map-index", str(2**64)], f"map_index: '{2**64}' is not an index; use"),
        (["--limit", "0"], "limit: '0' is not a whole number of at least 1; use"),
        (["--limit", "5000"], "limit: 5000 is not a page size; use 1 to 1000"),
        (["--page", "garbage"], "page: 'garbage' is not a page token; use"),
        (["--channel", "a b"], "channel: 'a b' is not a valid channel name; use"),
        (["--channel", "a b", "--all", "--expedite"], "channel: 'a b' is not a valid channel name; use"),
    ],
)
def test_bad_input_is_code_2_and_changes_nothing(
    delay: CommandLine, tickets: list[Ticket], words: list[str], problem: str
) -> None:
    result = delay("retries", *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(problem)
    assert result.err.count("\n") == 1
    assert ids(delay.document("retries")) == [each.id for each in tickets]


@pytest.mark.parametrize("words", [[], ["--all", "--expedite"], ["m1", "--give-up", "--yes"]])
def test_a_database_that_is_down_is_code_3(
    delay: CommandLine, define: Callable[..., str], closed_port: int, words: list[str]
) -> None:
    result = delay("retries", *words, "--conn-id", define(host="127.0.0.1", port=closed_port))
    assert (result.code, result.out) == (3, "")
    assert f"127.0.0.1:{closed_port}" in result.err


# -- tickets that another broker holds -----------------------------------------------------------------------------


@pytest.fixture
def rabbit(delay: CommandLine, monkeypatch: pytest.MonkeyPatch, closed_port: int) -> CommandLine:
    """Connection ``rabbit`` is a RabbitMQ, which is not asked for anything here."""
    connection = {"conn_type": "rabbitmq", "host": "127.0.0.1", "port": closed_port}
    monkeypatch.setenv("AIRFLOW_CONN_RABBIT", json.dumps(connection))
    return delay


def follow(ledger: Ledger, held: Message) -> None:
    """What a dispatcher does that follows the journal of RabbitMQ."""
    entry = JournalEntry(
        message_id=held.id,
        change=Change.SCHEDULED,
        at=SystemClock().now(),
        channel=held.channel,
        deliver_at=held.deliver_at,
        position="1",
        message=held,
    )
    ledger.transact(lambda c: projection.project(c, "rabbit", [entry], after=FROM_THE_START, position="1"))


@pytest.mark.parametrize("words", [["--expedite"], ["--give-up", "--yes"]])
@pytest.mark.parametrize("by_id", [True, False], ids=["id", "filter"])
def test_a_ticket_that_rabbitmq_holds_is_listed_but_not_given_back(
    rabbit: CommandLine, broker: EmbeddedBroker, tickets: list[Ticket], words: list[str], by_id: bool
) -> None:
    held = ticket(9, map_index=9)
    follow(broker.ledger, held.as_message(DEFAULT_CHANNEL))
    [listed] = rabbit.document("retries", "--conn-id", "rabbit")["retries"]
    assert (listed["message_id"], listed["map_index"], listed["reason"]) == (held.id, 9, REASON)
    selected = [held.id] if by_id else ["--dag-id", "sales"]
    result = rabbit("retries", *selected, *words, "--conn-id", "rabbit")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"message '{held.id}' is held by RabbitMQ itself and cannot be ")
    assert 'hold="ledger"' in result.err
    assert ids(rabbit.document("retries")) == [*(each.id for each in tickets), held.id]


@pytest.mark.parametrize(("words", "change"), [(["--expedite"], "expedited"), (["--give-up", "--yes"], "cancelled")])
def test_tickets_that_the_ledger_holds_for_rabbitmq_can_be_changed(
    rabbit: CommandLine, broker: EmbeddedBroker, tickets: list[Ticket], words: list[str], change: str
) -> None:
    """Those of other connections stay as they are."""
    held = ticket(9, map_index=9).as_message(DEFAULT_CHANNEL)
    broker.ledger.transact(
        lambda c: scheduling.insert(c, [held], destination="rabbit", on_conflict=OnConflict.KEEP, now_ms=0)
    )
    done = rabbit.document("retries", "--all", *words, "--conn-id", "rabbit", "--hold", "ledger")
    assert done == {"change": change, "message_ids": [held.id], "too_late": []}
    assert rabbit.document("show", held.id)["history"][-1]["change"] == change
    assert [each.id for each in tickets] == [each for each in ids(rabbit.document("retries")) if each != held.id]


def test_a_missing_index_is_reported(rabbit: CommandLine) -> None:
    result = rabbit("retries", "--conn-id", "rabbit", "--output", "json")
    assert (result.code, result.document["retries"]) == (0, [])
    assert "run `airflow delay dispatcher --index rabbit`" in result.err
