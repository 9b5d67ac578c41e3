from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient

from airflow_delay_provider.api.messages import SHOWN_ENTRIES
from airflow_delay_provider.brokers.ledger import search
from airflow_delay_provider.brokers.ledger.heartbeats import GONE_AFTER
from airflow_delay_provider.brokers.ledger.projection import step
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, State
from airflow_delay_provider.domain.message import Message, Origin
from airflow_delay_provider.testing.clock import START
from airflow_delay_provider.testing.kit import DelayTestKit
from tests.heartbeats import OWNER, WELL, let_pass, write_heartbeat
from tests.selective_auth import CLOSED_DAG, OPEN_DAG
from tests.unit.api.conftest import Become

HOUR = timedelta(hours=1)
Get = Callable[..., Any]


def test_a_message_has_all_that_was_scheduled(get: Get, delay_kit: DelayTestKit) -> None:
    """B7, B8, B12, B19, B21"""
    message_id = delay_kit.schedule(
        "invoices",
        {"n": 7},
        deliver_after=HOUR,
        message_id="a/b c",
        key="c-17",
        headers={"region": "eu"},
        priority=9,
        origin=Origin(dag_id=OPEN_DAG, run_id="manual 1", task_id="remind", map_index=2),
    )
    found = get(f"messages/{message_id}")
    expected = {
        "id": "a/b c",
        "channel": "invoices",
        "state": "SCHEDULED",
        "status": 100,
        "deliver_at": "2030-01-01T01:00:00Z",
        "scheduled_at": "2030-01-01T00:00:00Z",
        "dispatched_at": None,
        "lateness_ms": None,
        "overdue_ms": None,
        "content_type": "application/json",
        "priority": 9,
        "key": "c-17",
        "handled_count": 0,
        "connection": "delay_default",
        "held_by": "ledger",
        "headers": {"region": "eu"},
        "payload": {"size": 7, "format": "json", "content": '{\n  "n": 7\n}', "is_truncated": False},
        "origin": {"dag_id": OPEN_DAG, "run_id": "manual 1", "task_id": "remind", "map_index": 2},
        "task_link": f"/dags/{OPEN_DAG}/runs/manual%201/tasks/remind/mapped/2",
        "link": "/v1/messages/a%2Fb%20c",
        "can_edit": True,
        "can_download": True,
        "actions": ["cancel", "reschedule", "expedite"],
        "warning": None,
        "is_awaited": False,
    }
    assert {name: found[name] for name in expected} == expected


def test_a_message_that_its_broker_holds_is_not_found_for_the_right_reason(
    client: TestClient, delay_kit: DelayTestKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_RABBIT", json.dumps({"conn_type": "rabbitmq", "host": "nowhere"}))

    def reason() -> str:
        answer = client.get("/v1/messages/m1", params={"conn_id": "rabbit"})
        assert answer.status_code == 404
        detail: str = answer.json()["detail"]
        return detail

    def notice() -> str | None:
        found = client.get("/v1/messages", params={"conn_id": "rabbit"}).json()
        assert found["messages"] == []
        said: str | None = found["notice"]
        return said

    assert "run `airflow delay dispatcher --index rabbit`" in reason()
    assert notice() == reason()
    delay_kit.broker.ledger.transact(step, "rabbit", after=FROM_THE_START, position="1.0")
    assert reason().startswith("The index of connection 'rabbit' has no message 'm1'.")
    assert notice() is None
    assert client.get("/v1/messages").json()["notice"] is None


def test_a_dispatched_message_has_its_lateness(get: Get, delay_kit: DelayTestKit) -> None:
    """B12"""
    message_id = delay_kit.schedule("invoices", deliver_after=60)
    delay_kit.clock.advance(timedelta(seconds=61, milliseconds=234))
    assert get(f"messages/{message_id}")["overdue_ms"] == 1234
    delay_kit.dispatch()
    found = get(f"messages/{message_id}")
    assert (found["state"], found["status"], found["lateness_ms"]) == ("DISPATCHED", 101, 1234)
    assert (found["dispatched_at"], found["overdue_ms"], found["actions"]) == ("2030-01-01T00:01:01.234000Z", None, [])


def test_an_unknown_message_is_not_found(client: TestClient) -> None:
    """B13, B47"""
    for path in ("messages", "history", "payload"):
        answer = client.get(f"/v1/{path}/no such")
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
        assert "'no such' is not known" in answer.json()["detail"]


def test_the_list_has_pages_with_links_both_ways(get: Get, client: TestClient, delay_kit: DelayTestKit) -> None:
    """B9, B10, B47"""
    ids = [delay_kit.schedule("invoices", deliver_after=n + 1, message_id=f"m{n}") for n in range(5)]
    first = get("messages", limit=2, channel="invoices")
    second = client.get(first["links"]["next"]).json()
    third = client.get(second["links"]["next"]).json()
    assert [[each["id"] for each in page["messages"]] for page in (first, second, third)] == [
        ids[:2],
        ids[2:4],
        ids[4:],
    ]
    assert (first["links"]["prev"], third["links"]["next"], third["next"]) == (None, None, None)
    back = client.get(third["links"]["prev"]).json()
    assert [each["id"] for each in back["messages"]] == ids[2:4]
    assert "channel=invoices" in back["links"]["next"]


@pytest.mark.parametrize("state", ["SCHEDULED", "scheduled", "100"])
def test_the_list_is_filtered_by_name_or_number_of_the_state(get: Get, delay_kit: DelayTestKit, state: str) -> None:
    """B11, B64"""
    waiting = delay_kit.schedule("invoices", deliver_after=HOUR)
    delay_kit.schedule("invoices")
    assert [each["id"] for each in get("messages", state=state)["messages"]] == [waiting]
    assert len(get("messages", state=["SCHEDULED", "DISPATCHED"])["messages"]) == 2


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"channel": "orders"}, ["b"]),
        ({"dag_id": OPEN_DAG}, ["a", "b"]),
        ({"dag_id": OPEN_DAG, "run_id": "r1", "task_id": "t", "map_index": -1}, ["a"]),
        ({"due_from": "2030-01-01T00:00:03Z"}, ["c"]),
        ({"due_to": "2030-01-01T00:00:02+00:00"}, ["a"]),
        ({"search": "c"}, ["c"]),
        ({"connection": "delay_default"}, ["a", "b", "c"]),
        ({"connection": "rabbit"}, []),
    ],
)
def test_each_filter_selects(get: Get, delay_kit: DelayTestKit, query: dict[str, Any], found: list[str]) -> None:
    for n, (message_id, channel, run_id) in enumerate([("a", "inv", "r1"), ("b", "orders", "r2"), ("c", "inv", "")]):
        origin = Origin(dag_id=OPEN_DAG, run_id=run_id, task_id="t") if run_id else None
        delay_kit.schedule(channel, deliver_after=n + 1, message_id=message_id, origin=origin)
    assert [each["id"] for each in get("messages", **query)["messages"]] == found


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"state": "LOST"}, "state"),
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"page": "rubbish"}, "page"),
        ({"due_from": "tomorrow"}, "due_from"),
        ({"due_from": "2030-01-01T00:00:00"}, "due_from"),
        ({"map_index": 2**31}, "map_index"),
        ({"channel": "a\0b"}, "channel"),
        ({"search": "x" * 256}, "search"),
    ],
)
def test_a_bad_parameter_is_named(client: TestClient, query: dict[str, Any], field: str) -> None:
    answer = client.get("/v1/messages", params=query)
    assert (answer.status_code, answer.json()["field"]) == (400, field), answer.text
    assert answer.json()["detail"].startswith(f"{field}:")


def test_counts_have_links_to_their_lists(get: Get, client: TestClient, delay_kit: DelayTestKit) -> None:
    """B14, B15, B49"""
    assert get("counts")["next_scheduled_message_at"] is None
    for n in range(3):
        delay_kit.schedule("invoices", deliver_after=n + 1)
    delay_kit.schedule("orders", deliver_after=HOUR)
    delay_kit.advance(timedelta(seconds=1))
    found = get("counts")
    assert {name: each["count"] for name, each in found["counts"].items()} == {
        "SCHEDULED": 3,
        "DISPATCHED": 1,
        "CANCELLED": 0,
        "DEAD": 0,
    }
    assert found["next_scheduled_message_at"] == "2030-01-01T00:00:02Z"
    of_channel = get("counts", channel="orders")
    assert of_channel["counts"]["SCHEDULED"] == {
        "count": 1,
        "links": {"messages": "/v1/messages?state=100&channel=orders"},
    }
    assert of_channel["next_scheduled_message_at"] == "2030-01-01T01:00:00Z"
    listed = client.get(of_channel["counts"]["SCHEDULED"]["links"]["messages"]).json()
    assert [each["channel"] for each in listed["messages"]] == ["orders"]
    assert get("counts", connection="delay_default")["next_scheduled_message_at"] == "2030-01-01T00:00:02Z"


def test_overdue_messages_are_counted(get: Get, delay_kit: DelayTestKit, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(5):
        delay_kit.schedule("invoices", deliver_after=n + 1)
    delay_kit.clock.advance(timedelta(seconds=4, milliseconds=500))
    oldest = "2030-01-01T00:00:01Z"
    assert get("counts")["overdue"] == {"count": 4, "is_exact": True, "oldest_deliver_at": oldest}
    monkeypatch.setattr(search, "MOST_OVERDUE", 3)
    assert get("counts")["overdue"] == {"count": 3, "is_exact": False, "oldest_deliver_at": oldest}


def test_channels_have_counts_and_pages(get: Get, delay_kit: DelayTestKit) -> None:
    for channel in ("b", "a", "c"):
        delay_kit.schedule(channel, deliver_after=HOUR)
    delay_kit.schedule("b")
    first = get("channels", limit=2)
    assert [each["channel"] for each in first["channels"]] == ["a", "b"]
    assert first["channels"][1]["counts"] == {"SCHEDULED": 1, "DISPATCHED": 1, "CANCELLED": 0, "DEAD": 0}
    assert get("channels", limit=2, after=first["next"]) == {
        "channels": [{"channel": "c", "counts": {"SCHEDULED": 1, "DISPATCHED": 0, "CANCELLED": 0, "DEAD": 0}}],
        "next": None,
    }


def test_the_history_tells_every_change_and_who_requested_it(
    get: Get, act: Callable[..., Any], delay_kit: DelayTestKit
) -> None:
    message_id = delay_kit.schedule("invoices", deliver_after=60)
    act("reschedule", ids=[message_id], deliver_after=120)
    act("cancel", ids=[message_id])
    entries = get(f"history/{message_id}")["entries"]
    assert [(each["change"], each["state"], each["reason"]) for each in entries] == [
        ("scheduled", "SCHEDULED", None),
        ("rescheduled", "SCHEDULED", "requested by the admin"),
        ("cancelled", "CANCELLED", "requested by the admin"),
    ]
    assert [each["deliver_at"] for each in entries] == ["2030-01-01T00:01:00Z"] + ["2030-01-01T00:02:00Z"] * 2


def test_a_long_history_has_its_latest_part(get: Get, delay_kit: DelayTestKit) -> None:
    message_id = delay_kit.schedule("invoices", deliver_after=60)
    for minute in range(SHOWN_ENTRIES + 2):
        delay_kit.broker.reschedule([message_id], START + timedelta(minutes=minute + 2))
    found = get(f"history/{message_id}")
    assert (found["omitted"], len(found["entries"])) == (3, SHOWN_ENTRIES)


# -- payloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "content_type", "shown"),
    [
        ("hi", None, ("text", "hi", False)),
        ("x" * 20, None, ("text", "x" * 10, True)),
        (b"\x00\xff", None, ("base64", base64.b64encode(b"\x00\xff").decode(), False)),
        (b"{broken", "application/json", ("text", "{broken", False)),
        ([1], "application/cloudevents+json", ("json", "[\n  1\n]", False)),
        (b'"\\ud800"', "application/json", ("json", '"\\ud800"', False)),
        (b"", "text/plain", ("text", "", False)),
    ],
)
def test_payloads_are_shown_by_their_type_up_to_a_limit(
    get: Get,
    delay_kit: DelayTestKit,
    monkeypatch: pytest.MonkeyPatch,
    payload: Any,
    content_type: str | None,
    shown: tuple[str, str, bool],
) -> None:
    monkeypatch.setenv("AIRFLOW__DELAY__SHOWN_PAYLOAD_BYTES", "10")
    message_id = delay_kit.schedule("invoices", payload, content_type=content_type)
    found = get(f"messages/{message_id}")["payload"]
    assert (found["format"], found["content"], found["is_truncated"]) == shown


def test_secrets_are_masked_and_the_download_is_for_editors(
    get: Get, client: TestClient, become: Become, delay_kit: DelayTestKit
) -> None:
    message_id = delay_kit.schedule("invoices", {"password": "hunter2", "n": 1}, headers={"api_key": "k-1"})
    found = get(f"messages/{message_id}")
    assert json.loads(found["payload"]["content"]) == {"password": "***", "n": 1}
    assert found["headers"] == {"api_key": "***"}
    whole = client.get(f"/v1/payload/{message_id}")
    assert whole.json() == {"password": "hunter2", "n": 1}
    assert whole.headers["content-disposition"].startswith("attachment")
    assert (whole.headers["content-type"], whole.headers["x-content-type-options"]) == (
        "application/octet-stream",
        "nosniff",
    )
    become("viewer")
    assert client.get(f"/v1/payload/{message_id}").status_code == 403
    assert not get(f"messages/{message_id}")["can_download"]


def test_payloads_can_be_hidden(
    get: Get, client: TestClient, delay_kit: DelayTestKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__DELAY__SHOW_PAYLOADS", "False")
    message_id = delay_kit.schedule("invoices", "secret")
    found = get(f"messages/{message_id}")
    assert found["payload"] == {"size": 6, "format": "hidden", "content": None, "is_truncated": False}
    assert not found["can_download"]
    assert client.get(f"/v1/payload/{message_id}").status_code == 403


# -- who may see what --------------------------------------------------------------------------------------------------


def test_readers_see_only_messages_of_dags_that_they_may_read(
    get: Get, client: TestClient, become: Become, delay_kit: DelayTestKit
) -> None:
    for n, dag_id in enumerate([OPEN_DAG, CLOSED_DAG, None, CLOSED_DAG, OPEN_DAG]):
        origin = None if dag_id is None else Origin(dag_id=dag_id, run_id="r", task_id="t")
        delay_kit.schedule("invoices", deliver_after=n + 1, message_id=str(n), origin=origin)
    become("viewer")
    found = get("messages", limit=2)
    assert [each["id"] for each in found["messages"]] == ["0", "2"]
    assert [each["id"] for each in client.get(found["links"]["next"]).json()["messages"]] == ["4"]
    assert [client.get(f"/v1/messages/{n}").status_code for n in range(5)] == [200, 403, 200, 403, 200]
    assert client.get("/v1/history/1").status_code == 403
    assert not any(each["can_edit"] for each in found["messages"])


# -- warnings and dead letters -----------------------------------------------------------------------------------------


def test_a_scheduled_message_without_a_dispatcher_says_so(get: Get, delay_kit: DelayTestKit) -> None:
    """B41"""
    message_id = delay_kit.schedule("invoices", deliver_after=HOUR)
    assert get(f"messages/{message_id}")["warning"] is None
    let_pass(delay_kit.broker.ledger, GONE_AFTER)
    warning = get(f"messages/{message_id}")["warning"]
    assert warning.startswith("No dispatcher has been seen since ")
    assert warning.endswith("start one with `airflow delay dispatcher`.")
    failing = {**WELL, "well": False, "failures": 2, "error": "LedgerError: locked"}
    write_heartbeat(delay_kit.broker.ledger, loops={"dispatch_embedded": failing})
    warning = get(f"messages/{message_id}")["warning"]
    assert warning.startswith(f"Dispatcher {OWNER} runs, but its loop dispatch_embedded failed 2 times since")
    delay_kit.advance(HOUR)
    assert get(f"messages/{message_id}")["warning"] is None


def test_dead_letters_have_their_reason(get: Get, delay_kit: DelayTestKit) -> None:
    def refuse(_message: object) -> None:
        raise ValueError("no such customer")

    dead = delay_kit.schedule("invoices")
    delay_kit.schedule("orders")
    delay_kit.consume("invoices", refuse)
    [found] = get("dead-letters")["messages"]
    assert (found["id"], found["state"]) == (dead, State.DEAD.name)
    assert "no such customer" in found["reason"]
    assert found["died_at"] == "2030-01-01T00:00:00Z"
    assert get("dead-letters", channel="orders")["messages"] == []
    assert get(f"messages/{dead}")["actions"] == ["replay"]


def test_a_message_that_was_sent_early_on_purpose_has_negative_lateness(get: Get, delay_kit: DelayTestKit) -> None:
    message = Message(channel="invoices", payload=b"", deliver_at=START + timedelta(seconds=5))
    delay_kit.broker.send([message])
    assert get(f"messages/{message.id}")["lateness_ms"] == -5000
