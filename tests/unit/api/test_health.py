"""What needs attention, decided from what the ledger says."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from airflow_delay_provider.api.health import Observed, find_problems
from airflow_delay_provider.api.overview_models import HealthProblem
from airflow_delay_provider.brokers.ledger.broker_status import STALE_AFTER, BrokerStatus
from airflow_delay_provider.brokers.ledger.cluster_circuits import Outage
from airflow_delay_provider.brokers.ledger.heartbeats import GONE_AFTER, DispatcherRecord, LoopReport
from airflow_delay_provider.brokers.ledger.search import MOST_OVERDUE
from airflow_delay_provider.brokers.port import TopologyIssue
from airflow_delay_provider.testing.clock import START

SECOND = timedelta(seconds=1)


def dispatcher(owner: str = "d1", *, age: timedelta = SECOND, **fields: Any) -> DispatcherRecord:
    ours: dict[str, Any] = {
        "owner": owner,
        "host": "host-1",
        "boot_id": None,
        "pid": 7,
        "version": "1",
        "started_at": START - timedelta(days=1),
        "seen_at": START - age,
        "age": age,
        "stopped_at": None,
        "index_connections": (),
        "kafka_connections": (),
        "loops": (),
    }
    return DispatcherRecord(**ours | fields)


def gone(owner: str = "killed", *, age: timedelta = GONE_AFTER, **fields: Any) -> DispatcherRecord:
    return dispatcher(owner, age=age, **fields)


def stopped(owner: str = "stopped", *, age: timedelta = timedelta(minutes=5), **fields: Any) -> DispatcherRecord:
    return dispatcher(owner, age=age, stopped_at=START - age, **fields)


def broker(**fields: Any) -> BrokerStatus:
    ours: dict[str, Any] = {
        "conn_id": "rabbit",
        "checked_at": START,
        "age": SECOND,
        "reachable": True,
        "description": "RabbitMQ 4",
        "error": None,
        "topology_verified_at": START,
        "topology_issues": (),
        "clock_skew": None,
        "skew_measured_at": None,
    }
    return BrokerStatus(**ours | fields)


def loop(**fields: Any) -> LoopReport:
    ours: dict[str, Any] = {"well": False, "succeeded_at": None, "failures": 2, "error": "LedgerError: locked"}
    return LoopReport(**{"name": "dispatch_embedded"} | ours | fields)


def problems(**fields: Any) -> list[HealthProblem]:
    ours: dict[str, Any] = {
        "now": START,
        "database_now": START,
        "dispatchers": [dispatcher()],
        "brokers": [],
        "outages": {},
        "waiting_embedded": 0,
        "waiting_destinations": [],
        "overdue": 0,
        "oldest_due": None,
    }
    return find_problems(Observed(**ours | fields))


def only(**fields: Any) -> HealthProblem:
    [problem] = problems(**fields)
    return problem


# -- dispatchers -------------------------------------------------------------------------------------------------------


def test_a_dispatcher_that_runs_is_no_problem() -> None:
    assert problems(waiting_embedded=5, waiting_destinations=["rabbit"]) == []


@pytest.mark.parametrize("waiting", [0, 5])
def test_a_killed_dispatcher_is_reported_with_the_command_that_starts_one(waiting: int) -> None:
    """B41"""
    found = only(dispatchers=[gone()], waiting_embedded=waiting)
    assert (found.severity, found.subject) == ("error", "dispatcher")
    assert found.text == (
        "No dispatcher has been seen since 2029-12-31 23:59:48 UTC (killed sent its last heartbeat then)."
        " Messages in the ledger wait until one runs."
    )
    assert found.remedy == "Start one with `airflow delay dispatcher`."


def test_a_stopped_dispatcher_is_reported_only_while_messages_wait() -> None:
    assert problems(dispatchers=[stopped()]) == []
    assert "stopped was stopped then" in only(dispatchers=[stopped()], waiting_embedded=1).text
    assert only(dispatchers=[stopped()], waiting_destinations=["rabbit"]).subject == "dispatcher"


def test_a_ledger_without_dispatchers_is_reported_only_while_messages_wait() -> None:
    assert problems(dispatchers=[]) == []
    assert "No dispatcher has ever been seen" in only(dispatchers=[], waiting_embedded=1).text


def test_a_killed_dispatcher_that_another_replaced_is_no_problem() -> None:
    old = gone(kafka_connections=("stream",), index_connections=("rabbit",), age=timedelta(hours=1))
    new = dispatcher(kafka_connections=("stream",), index_connections=("rabbit",))
    assert problems(dispatchers=[new, old], waiting_embedded=5) == []


def test_a_killed_dispatcher_whose_successor_was_stopped_is_no_problem() -> None:
    old = gone(kafka_connections=("stream",), age=timedelta(hours=1))
    assert problems(dispatchers=[stopped(kafka_connections=("stream",)), old]) == []


def test_connections_that_only_a_killed_dispatcher_served_are_reported() -> None:
    killed = gone(kafka_connections=("stream",), index_connections=("rabbit",))
    kafka, index = problems(dispatchers=[dispatcher(), killed])
    assert (kafka.subject, kafka.text) == (
        "stream",
        "No dispatcher runs with --kafka stream. Delayed messages of this Kafka connection wait until one runs.",
    )
    assert kafka.remedy == "Start one with `airflow delay dispatcher --kafka stream`."
    assert (index.subject, index.remedy) == ("rabbit", "Start one with `airflow delay dispatcher --index rabbit`.")


def test_a_failing_loop_is_reported_once() -> None:
    found = only(dispatchers=[dispatcher(loops=(loop(),))])
    assert (found.severity, found.subject) == ("error", "d1")
    assert found.text == "Loop dispatch_embedded of dispatcher d1 failed 2 times since its start: LedgerError: locked"
    assert "host-1" in found.remedy
    sending = dispatcher(loops=(loop(name="dispatch_to_brokers:rabbit"),))
    unreachable = broker(reachable=False, error="refused")
    assert only(dispatchers=[sending], brokers=[unreachable]).subject == "rabbit"
    assert problems(dispatchers=[sending], brokers=[broker()])[0].subject == "d1"


def test_loops_of_dispatchers_that_are_gone_are_not_reported() -> None:
    assert problems(dispatchers=[dispatcher(), gone(loops=(loop(),))]) == []


# -- brokers and clocks ------------------------------------------------------------------------------------------------


def test_an_unreachable_broker_is_reported_while_it_is_checked() -> None:
    found = only(brokers=[broker(reachable=False, error="connection refused")])
    assert (found.severity, found.subject) == ("error", "rabbit")
    assert found.text == "The broker of connection 'rabbit' cannot be used: connection refused"
    assert found.remedy.startswith("Start the broker")
    assert problems(brokers=[broker(reachable=False, error="connection refused", age=STALE_AFTER)]) == []


def test_topology_problems_are_reported_but_not_hints() -> None:
    issues = (
        TopologyIssue(text="queue delay.v1.3 is missing", is_problem=True),
        TopologyIssue(text="fine", is_problem=False),
    )
    found = only(brokers=[broker(topology_issues=issues)])
    assert found.text == "Queue delay.v1.3 is missing"
    assert found.remedy == "Run `airflow delay topology verify --conn-id rabbit`, then `topology create`."
    assert problems(brokers=[broker(topology_issues=issues, age=STALE_AFTER)]) == []


@pytest.mark.parametrize(("seconds", "words"), [(3.5, "3.5 s ahead of"), (-60, "60.0 s behind"), (3, None), (-3, None)])
def test_clocks_that_differ_are_reported(seconds: float, words: str | None) -> None:
    skew = timedelta(seconds=seconds)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("API server", {"database_now": START - skew}),
        ("d1", {"dispatchers": [dispatcher(clock_skew=skew)]}),
        ("rabbit", {"brokers": [broker(clock_skew=skew)]}),
    ]
    for subject, fields in cases:
        found = problems(**fields)
        assert [each.subject for each in found] == ([] if words is None else [subject])
        assert all(words is not None and words in each.text and "NTP" in each.remedy for each in found)


def test_old_clock_readings_are_not_reported() -> None:
    late = timedelta(hours=1)
    assert (
        problems(dispatchers=[dispatcher(), gone(clock_skew=late)], brokers=[broker(clock_skew=late, age=late)]) == []
    )


# -- clusters and messages ---------------------------------------------------------------------------------------------


def test_a_cluster_that_is_down_is_a_warning() -> None:
    outage = Outage(since=START - timedelta(hours=1), failed_checks=4, next_check_at=START + SECOND)
    found = only(outages={"spark://a:7077": outage})
    assert (found.severity, found.subject) == ("warning", "spark://a:7077")
    assert "is down since 2029-12-31 23:00:00 UTC (4 failed checks)" in found.text
    assert found.remedy == "Start the cluster. The next check is at 00:00:01 UTC."


@pytest.mark.parametrize(
    ("n", "words"),
    [(1, "1 message is"), (7, "7 messages are"), (MOST_OVERDUE + 1, f"More than {MOST_OVERDUE} messages are")],
)
def test_overdue_messages_are_a_warning_after_a_minute(n: int, words: str) -> None:
    found = only(overdue=n, oldest_due=START - timedelta(seconds=60))
    assert (found.severity, found.text) == ("warning", f"{words} overdue, the first since 2029-12-31 23:59:00 UTC.")
    assert problems(overdue=n, oldest_due=START - timedelta(seconds=59)) == []


def test_errors_come_before_warnings() -> None:
    outage = Outage(since=START, failed_checks=1, next_check_at=START)
    found = problems(dispatchers=[gone()], outages={"a": outage}, overdue=1, oldest_due=START - timedelta(hours=1))
    assert [each.severity for each in found] == ["error", "warning", "warning"]
