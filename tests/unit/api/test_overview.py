from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import literal

from airflow_delay_provider.api import overview
from airflow_delay_provider.brokers.ledger import broker_status, cluster_circuits, fold
from airflow_delay_provider.brokers.ledger.heartbeats import GONE_AFTER, mark_stopped
from airflow_delay_provider.brokers.port import TopologyIssue
from airflow_delay_provider.domain.clock import SystemClock, floor_ms
from airflow_delay_provider.testing.clock import START
from airflow_delay_provider.testing.kit import DelayTestKit
from tests.heartbeats import OWNER, WELL, let_pass, write_heartbeat
from tests.unit.api.conftest import Become

Get = Callable[..., Any]
MINUTE = timedelta(minutes=1)


def fold_all(kit: DelayTestKit) -> None:
    """Count what happened so far, as a dispatcher does."""
    while kit.broker.ledger.transact(lambda c: fold.fold(c, 1000)):
        pass
    now_ms = floor_ms(kit.clock.now())
    kit.broker.ledger.transact(lambda c: fold.sample_depth(c, now_ms=now_ms))


@pytest.fixture
def same_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The database's clock is that of the test."""
    monkeypatch.setattr(overview, "database_now_ms", lambda _connection: literal(floor_ms(SystemClock().now())))


def test_you_learn_who_you_are(get: Get, become: Become) -> None:
    assert get("me") == {"user": "the admin", "is_administrator": True}
    become("viewer")
    assert get("me") == {"user": "the viewer", "is_administrator": False}


# -- figures -----------------------------------------------------------------------------------------------------------


def test_the_series_says_what_happened_and_how_late(get: Get, delay_kit: DelayTestKit) -> None:
    """B38, B39, B41, B65"""
    for n in range(4):
        delay_kit.schedule("invoices", deliver_after=10, message_id=str(n))
    delay_kit.broker.cancel(["3"])
    delay_kit.clock.advance(timedelta(seconds=12))
    delay_kit.dispatch()
    delay_kit.schedule("invoices", deliver_after=MINUTE)
    fold_all(delay_kit)
    found = get("series")
    assert (found["step_seconds"], len(found["points"])) == (60, 60)
    last = found["points"][-1]
    lateness = last.pop("lateness")
    assert last == {
        "at": "2030-01-01T00:00:00Z",
        "scheduled": 5,
        "dispatched": 3,
        "cancelled": 1,
        "dead": 0,
        "depth": 1,
        "early": 0,
    }
    assert lateness["max_ms"] == 2000
    assert 1500 < lateness["p50_ms"] <= lateness["p95_ms"] <= lateness["p99_ms"] <= 2000
    assert found["points"][0] == {
        "at": "2029-12-31T23:01:00Z",
        "scheduled": 0,
        "dispatched": 0,
        "cancelled": 0,
        "dead": 0,
        "depth": None,
        "lateness": None,
        "early": 0,
    }


@pytest.mark.parametrize(("window", "points"), [("hour", 60), ("day", 24), ("month", 30)])
def test_every_range_has_a_readable_number_of_points(get: Get, window: str, points: int) -> None:
    found = get("series", range=window)
    assert len(found["points"]) == points


def test_the_series_of_one_connection(get: Get, delay_kit: DelayTestKit) -> None:
    delay_kit.schedule("invoices", deliver_after=60)
    fold_all(delay_kit)
    delay_kit.clock.advance(timedelta(seconds=1))
    assert get("series", connection="delay_default")["points"][-1]["scheduled"] == 1
    assert get("series", connection="rabbit")["points"][-1]["scheduled"] == 0


def test_upcoming_messages_are_counted_by_due_time(get: Get, delay_kit: DelayTestKit) -> None:
    for after in (30, 90, 100, 5400, 86400 * 3):
        delay_kit.schedule("invoices", deliver_after=after)
    fold_all(delay_kit)

    def counts(window: str) -> tuple[int, int, dict[str, int]]:
        found = get("upcoming", range=window)
        return (
            found["step_seconds"],
            len(found["bins"]),
            {each["at"]: each["count"] for each in found["bins"] if each["count"]},
        )

    assert counts("hour") == (60, 60, {"2030-01-01T00:00:00Z": 1, "2030-01-01T00:01:00Z": 2})
    assert counts("day") == (3600, 24, {"2030-01-01T00:00:00Z": 3, "2030-01-01T01:00:00Z": 1})
    assert counts("month") == (86400, 30, {"2030-01-01T00:00:00Z": 4, "2030-01-04T00:00:00Z": 1})
    assert sum(each["count"] for each in get("upcoming", connection="rabbit")["bins"]) == 0


@pytest.mark.parametrize("path", ["series", "upcoming"])
def test_an_unknown_range_is_refused(client: TestClient, path: str) -> None:
    answer = client.get(f"/v1/{path}", params={"range": "year"})
    assert (answer.status_code, answer.json()["field"]) == (400, "range")


@pytest.mark.parametrize("path", ["series", "upcoming", "health", "counts", "channels", "messages"])
def test_a_connection_without_a_ledger_is_not_found(client: TestClient, path: str) -> None:
    answer = client.get(f"/v1/{path}", params={"conn_id": "nowhere"})
    assert (answer.status_code, answer.json()["detail"]) == (
        404,
        "Connection 'nowhere' cannot be used here: it is not defined, has another type or a wrong setting, or its"
        " client library is not installed. The log of the API server says which.",
    )


# -- health ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("same_clock")
def test_a_healthy_ledger_has_no_problems(get: Get, delay_kit: DelayTestKit) -> None:
    delay_kit.schedule("invoices", deliver_after=60)
    found = get("health")
    assert (found["problems"], found["brokers"], found["circuits"]) == ([], [], [])
    assert [each["status"] for each in found["dispatchers"]] == ["alive"]
    assert (found["api_clock_skew_ms"], found["now"]) == (0, "2030-01-01T00:00:00Z")


@pytest.mark.usefixtures("same_clock")
def test_dispatchers_are_listed_with_their_loops(get: Get, delay_kit: DelayTestKit) -> None:
    """B40, B41"""
    failing = {"well": False, "succeeded_ms_ago": None, "failures": 2, "error": "LedgerError: locked"}
    loops = {"dispatch_embedded": WELL, "dispatch_to_brokers:rabbit": WELL, "prune": failing}
    delay_kit.schedule("invoices", deliver_after=10)
    delay_kit.clock.advance(timedelta(seconds=12))
    write_heartbeat(delay_kit.broker.ledger, loops=loops, clock_skew=timedelta(milliseconds=-7))
    found = next(each for each in get("health")["dispatchers"] if each["name"] == OWNER)
    assert (found["status"], found["clock_skew_ms"], found["stopped_at"]) == ("unwell", -7, None)
    well, sending, unwell = found["loops"]
    assert (well["name"], well["is_healthy"], well["error"]) == ("dispatch_embedded", True, None)
    assert (well["lag_ms"], sending["lag_ms"]) == (2000, 0)
    assert unwell == {
        "name": "prune",
        "is_healthy": False,
        "last_success_at": None,
        "failures": 2,
        "error": "LedgerError: locked",
        "lag_ms": None,
    }
    delay_kit.broker.ledger.transact(lambda c: mark_stopped(c, OWNER))
    assert {each["status"] for each in get("health")["dispatchers"]} == {"alive", "stopped"}
    let_pass(delay_kit.broker.ledger, GONE_AFTER)
    assert {each["status"] for each in get("health")["dispatchers"]} == {"gone", "stopped"}


@pytest.mark.usefixtures("same_clock")
def test_a_killed_dispatcher_is_a_problem_until_another_one_starts(get: Get, delay_kit: DelayTestKit) -> None:
    let_pass(delay_kit.broker.ledger, GONE_AFTER)
    assert [each["subject"] for each in get("health")["problems"]] == ["dispatcher"]
    write_heartbeat(delay_kit.broker.ledger)
    assert get("health")["problems"] == []


@pytest.mark.usefixtures("same_clock")
def test_brokers_and_circuits_are_listed(get: Get, delay_kit: DelayTestKit) -> None:
    ledger = delay_kit.broker.ledger
    ledger.transact(broker_status.write_reached, "rabbit", description="RabbitMQ 4")
    ledger.transact(broker_status.write_skew, "rabbit", timedelta(seconds=9))
    ledger.transact(
        lambda c: broker_status.write_topology(c, "rabbit", [TopologyIssue(text="a queue is missing", is_problem=True)])
    )
    ledger.transact(lambda c: broker_status.write_failed(c, "stream", error="connection refused"))
    ledger.transact(lambda c: cluster_circuits.open_circuit(c, "spark://a", known=None, now=START, pause=MINUTE))
    found = get("health")
    rabbit, stream = found["brokers"]
    assert (rabbit["connection"], rabbit["is_reachable"], rabbit["clock_skew_ms"]) == ("rabbit", True, 9000)
    assert rabbit["topology_issues"] == [{"text": "a queue is missing", "is_problem": True}]
    assert (stream["connection"], stream["is_reachable"], stream["error"]) == ("stream", False, "connection refused")
    assert [each["cluster"] for each in found["circuits"]] == ["spark://a"]
    assert [each["subject"] for each in found["problems"]] == ["stream", "rabbit", "rabbit", "spark://a"]


def test_a_shifted_clock_of_the_api_server_is_a_problem(get: Get, delay_kit: DelayTestKit) -> None:
    # The clock of the kit is in 2030, that of the database is not.
    found = get("health")
    assert [each["subject"] for each in found["problems"]] == ["API server"]
    assert abs(found["api_clock_skew_ms"]) > 3000


@pytest.mark.usefixtures("same_clock")
def test_overdue_messages_are_a_problem(get: Get, delay_kit: DelayTestKit) -> None:
    delay_kit.schedule("invoices", deliver_after=1)
    delay_kit.clock.advance(timedelta(seconds=61))
    [problem] = get("health")["problems"]
    assert (problem["severity"], problem["subject"]) == ("warning", "messages")
    assert problem["text"] == "1 message is overdue, the first since 2030-01-01 00:00:01 UTC."
