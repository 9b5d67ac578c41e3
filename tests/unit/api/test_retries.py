from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient

from airflow_delay_provider.api import airflow_tasks
from airflow_delay_provider.brokers.ledger import cluster_circuits
from airflow_delay_provider.domain.message import Message, Origin
from airflow_delay_provider.spark.failures import Classification, Verdict
from airflow_delay_provider.spark.retries import History
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, Ticket, WaitsFor
from airflow_delay_provider.testing.clock import START
from airflow_delay_provider.testing.kit import DelayTestKit
from tests.selective_auth import CLOSED_DAG, OPEN_DAG
from tests.unit.api.conftest import Become

Get = Callable[..., Any]
MINUTE = timedelta(minutes=1)
ORIGIN = Origin(dag_id=OPEN_DAG, run_id="manual__1", task_id="load")
TICKET = Ticket(
    origin=ORIGIN,
    began_at=START - MINUTE,
    attempt=2,
    verdict="transient",
    reason="password=hunter2 was refused",
    cluster="spark://a:7077",
    deliver_at=START + MINUTE,
)
REFUSED = Classification(verdict=Verdict.TRANSIENT, rule="refused", line="", reason="a source refused")
HISTORY = replace(
    History(began_at=START - MINUTE).begin_attempt(START - MINUTE).fail_attempt(REFUSED, START, exit_code=1),
    budget={"attempts": (1, 4)},
).wait_until(START + MINUTE)
SHOWN = {
    "phase": "waiting",
    "attempts": [
        {
            "number": 1,
            "started_at": "2029-12-31T23:59:00Z",
            "ended_at": "2030-01-01T00:00:00Z",
            "verdict": "transient",
            "rule": "refused",
            "reason": "a source refused",
            "exit_code": 1,
        }
    ],
    "budget": {"attempts": {"used": 1, "limit": 4}},
}


@pytest.fixture
def histories(monkeypatch: pytest.MonkeyPatch, client: TestClient) -> dict[Origin, History]:
    """What Airflow's task state store has."""
    stored = {ORIGIN: HISTORY, replace(ORIGIN, dag_id=CLOSED_DAG): HISTORY}
    monkeypatch.setattr(
        airflow_tasks, "read_histories", lambda origins: {each: stored[each] for each in origins if each in stored}
    )
    return stored


def wait(kit: DelayTestKit, *tickets: Ticket) -> None:
    kit.broker.schedule([ticket.as_message(DEFAULT_CHANNEL) for ticket in tickets])


@pytest.mark.usefixtures("histories")
def test_a_waiting_spark_task_has_its_attempts_and_its_next_try(get: Get, delay_kit: DelayTestKit) -> None:
    wait(delay_kit, TICKET)
    [found] = get("retries")["retries"]
    assert (found["message"]["id"], found["message"]["origin"]["dag_id"]) == (TICKET.id, OPEN_DAG)
    assert found["message"]["can_edit"]
    del found["message"]
    assert found == {
        "attempt": 2,
        "verdict": "transient",
        "reason": "password=hunter2 was refused",
        "waits_for": "backoff",
        "extensions": 0,
        "began_at": "2029-12-31T23:59:00Z",
        "next_try_at": "2030-01-01T00:01:00Z",
        "circuit": {
            "cluster": "spark://a:7077",
            "is_open": False,
            "down_since": None,
            "failed_checks": 0,
            "next_check_at": None,
        },
        "history": SHOWN,
    }


def test_a_task_whose_cluster_is_down_says_since_when(get: Get, delay_kit: DelayTestKit) -> None:
    wait(delay_kit, replace(TICKET, waits_for=WaitsFor.CLUSTER, extension=3))
    delay_kit.broker.ledger.transact(
        lambda c: cluster_circuits.open_circuit(c, TICKET.cluster, known=None, now=START, pause=MINUTE)
    )
    [found] = get("retries")["retries"]
    assert (found["waits_for"], found["extensions"]) == ("cluster", 3)
    assert found["circuit"] == {
        "cluster": "spark://a:7077",
        "is_open": True,
        "down_since": "2030-01-01T00:00:00Z",
        "failed_checks": 1,
        "next_check_at": "2030-01-01T00:01:00Z",
    }
    assert found["history"] == {"phase": None, "attempts": [], "budget": {}}


def test_retries_have_pages_and_filters(get: Get, client: TestClient, delay_kit: DelayTestKit) -> None:
    tickets = [replace(TICKET, attempt=n, deliver_at=START + n * MINUTE) for n in (1, 2, 3)]
    wait(delay_kit, *tickets, replace(TICKET, origin=replace(ORIGIN, task_id="other")))
    first = get("retries", task_id="load", limit=2)
    second = client.get(first["links"]["next"]).json()
    assert [each["attempt"] for page in (first, second) for each in page["retries"]] == [1, 2, 3]
    assert get("retries", dag_id="none")["retries"] == []
    assert get("retries", channel="elsewhere")["retries"] == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b'"text"',
        b"\xff",
        b"[" * 100_000,
        json.dumps(TICKET.as_json() | {"attempt": "two"}).encode(),
        json.dumps(TICKET.as_json() | {"cluster": ["a"]}).encode(),
        json.dumps(TICKET.as_json() | {"verdict": None}).encode(),
        json.dumps(TICKET.as_json() | {"began_at": "2030-01-01T00:00:00"}).encode(),
        json.dumps(TICKET.as_json() | {"waits_for": "a miracle"}).encode(),
    ],
)
def test_messages_that_are_no_tickets_are_left_out(get: Get, delay_kit: DelayTestKit, payload: bytes) -> None:
    other = Message(channel=DEFAULT_CHANNEL, payload=payload, deliver_at=START + MINUTE, origin=ORIGIN)
    delay_kit.broker.schedule([other])
    wait(delay_kit, TICKET)
    assert [each["message"]["id"] for each in get("retries")["retries"]] == [TICKET.id]


@pytest.mark.usefixtures("histories")
@pytest.mark.parametrize("origin", [None, ORIGIN])
def test_a_forged_ticket_shows_no_attempts_of_another_task(
    get: Get, become: Become, delay_kit: DelayTestKit, origin: Origin | None
) -> None:
    theirs = replace(TICKET, origin=replace(ORIGIN, dag_id=CLOSED_DAG))
    delay_kit.broker.schedule([replace(theirs.as_message(DEFAULT_CHANNEL), origin=origin)])
    become("viewer")
    assert get("retries")["retries"] == []


@pytest.mark.usefixtures("histories")
def test_attempts_are_for_readers_of_the_dag(get: Get, client: TestClient, become: Become) -> None:
    task = {"run_id": "manual__1", "task_id": "load"}
    assert get("attempts", dag_id=OPEN_DAG, **task) == SHOWN
    assert get("attempts", dag_id=OPEN_DAG, **task, map_index=3) == {"phase": None, "attempts": [], "budget": {}}
    become("viewer")
    assert get("attempts", dag_id=OPEN_DAG, **task) == SHOWN
    answer = client.get("/v1/attempts", params={"dag_id": CLOSED_DAG, **task})
    assert (answer.status_code, answer.json()["detail"]) == (
        403,
        "You may not read the task instances of this DAG.",
    )


@pytest.mark.parametrize("missing", ["dag_id", "run_id", "task_id"])
def test_attempts_need_the_whole_task(client: TestClient, missing: str) -> None:
    query = {name: "x" for name in ("dag_id", "run_id", "task_id") if name != missing}
    answer = client.get("/v1/attempts", params=query)
    assert (answer.status_code, answer.json()["field"]) == (400, missing)


def test_retry_now_and_give_up(get: Get, act: Callable[..., Any], become: Become, delay_kit: DelayTestKit) -> None:
    other = replace(TICKET, attempt=3)
    wait(delay_kit, TICKET, other)
    become("user")
    act("cancel", ids=[other.id])
    act("expedite", ids=[TICKET.id])
    assert delay_kit.dispatch() == 1
    assert get("retries")["retries"] == []
