from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient
from httpx import Response

from airflow_delay_provider.api import scheduling
from airflow_delay_provider.testing.clock import START
from airflow_delay_provider.testing.kit import DelayTestKit
from tests.selective_auth import OPEN_DAG
from tests.unit.api.conftest import Become

AT = "2030-01-01T01:00:00Z"
FOR = "X-Broker-Scheduled-For"
Limit = Callable[..., None]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch, delay_kit: DelayTestKit) -> Limit:
    """Give the default connection limits."""

    def define(**extra: Any) -> None:
        connection = {"conn_type": "delay", "extra": {"ledger_url": delay_kit.url, **extra}}
        monkeypatch.setenv("AIRFLOW_CONN_DELAY_DEFAULT", json.dumps(connection))

    return define


def post(client: TestClient, at: str | None = None, **body: Any) -> Response:
    given = {"channel": "invoices", "payload": {"n": 7}}
    headers = {"Content-Type": "application/json"} | ({} if at is None else {FOR: at})
    # Not as ``json``, which refuses lone surrogates.
    answer: Response = client.post("/v1/messages", content=json.dumps(given | body), headers=headers)
    return answer


def send(client: TestClient, body: bytes = b"hi", channel: str = "invoices", **headers: str) -> Response:
    answer: Response = client.post(f"/v1/channels/{channel}/messages", content=body, headers=headers)
    return answer


def refused(answer: Response) -> tuple[int, str | None]:
    assert answer.headers["content-type"] == "application/problem+json"
    field: str | None = answer.json()["field"]
    return answer.status_code, field


# -- with a JSON body --------------------------------------------------------------------------------------------------


def test_a_message_is_created_and_found_at_its_location(client: TestClient, delay_kit: DelayTestKit) -> None:
    """B1, B2, B7, B8, B48"""
    answer = post(client, message_id="a/b", key="k", priority=9, deliver_after=3600)
    assert (answer.status_code, answer.headers["location"]) == (201, "/v1/messages/a%2Fb")
    assert answer.json() == {
        "message_id": "a/b",
        "outcome": "scheduled",
        "deliver_at": AT,
        "link": "/v1/messages/a%2Fb",
    }
    found = client.get(answer.headers["location"]).json()
    assert (found["id"], found["key"], found["priority"], found["state"]) == ("a/b", "k", 9, "SCHEDULED")
    assert delay_kit.record("a/b").message.payload == b'{"n":7}'


def test_the_delivery_time_can_be_a_header(client: TestClient) -> None:
    """B1, B2, B48"""
    answer = post(client, "2030-01-01T03:00:00+02:00")
    assert (answer.status_code, answer.json()["deliver_at"]) == (201, AT)


def test_a_message_without_a_time_is_delivered_at_once(client: TestClient, delay_kit: DelayTestKit) -> None:
    answer = post(client)
    assert (answer.status_code, answer.json()["outcome"]) == (201, "dispatched")
    assert [each.id for each in delay_kit.received("invoices")] == [answer.json()["message_id"]]


@pytest.mark.parametrize(
    ("body", "payload", "content_type"),
    [
        ({"payload": "hi"}, b"hi", "text/plain; charset=utf-8"),
        ({"payload": None}, b"null", "application/json"),
        ({"payload": [1, {"a": "ä"}]}, b'[1,{"a":"\\u00e4"}]', "application/json"),
        ({"payload": {"\ud800": 1}}, b'{"\\ud800":1}', "application/json"),
        (
            {"payload": base64.b64encode(b"\0\xff").decode(), "payload_base64": True},
            b"\0\xff",
            "application/octet-stream",
        ),
        ({"payload": "<a/>", "content_type": "application/xml"}, b"<a/>", "application/xml"),
    ],
)
def test_payloads_keep_their_bytes_and_type(
    client: TestClient, delay_kit: DelayTestKit, body: dict[str, Any], payload: bytes, content_type: str
) -> None:
    """B7"""
    message = delay_kit.record(post(client, **body).json()["message_id"]).message
    assert (message.payload, message.content_type) == (payload, content_type)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"deliver_at": "tomorrow"}, "deliver_at"),
        ({"deliver_at": "2030-01-01T00:00:00"}, "deliver_at"),
        ({"deliver_at": 1893456000}, "deliver_at"),
        ({"deliver_at": "2030-13-01T00:00:00Z"}, "deliver_at"),
        ({"deliver_at": "0001-01-01T00:00:00+01:00"}, "deliver_at"),
        ({"deliver_at": "9999-12-31T23:59:59Z"}, "deliver_at"),
        ({"deliver_at": AT, "deliver_after": 1}, "deliver_at"),
        ({"deliver_after": 1e300}, "deliver_after"),
        ({"deliver_after": -1e300}, "deliver_after"),
        ({"deliver_after": "soon"}, "deliver_after"),
        ({"channel": "a b"}, "channel"),
        ({"channel": ""}, "channel"),
        ({"channel": "x" * 256}, "channel"),
        ({"channel": "c\ud800"}, "channel"),
        ({"message_id": "a\0"}, "message_id"),
        ({"message_id": "a\n"}, "message_id"),
        ({"message_id": ""}, "message_id"),
        ({"message_id": "x" * 256}, "message_id"),
        ({"key": "a\0"}, "key"),
        ({"key": "\ud800"}, "key"),
        ({"headers": {"a": "b\0"}}, "headers"),
        ({"headers": {"a": 1}}, "headers.a"),
        ({"content_type": "x" * 256}, "content_type"),
        ({"priority": 256}, "priority"),
        ({"priority": -1}, "priority"),
        ({"priority": 10**30}, "priority"),
        ({"payload": "\ud800"}, "payload"),
        ({"payload": "no base64", "payload_base64": True}, "payload"),
        ({"payload": 7, "payload_base64": True}, "payload"),
        ({"hold": "consumer"}, "hold"),
        ({"on_conflict": "ignore"}, "on_conflict"),
        ({"later": True}, "later"),
        ({"conn_id": "a\0"}, "conn_id"),
    ],
)
def test_a_bad_field_is_named_and_nothing_is_stored(
    client: TestClient, delay_kit: DelayTestKit, body: dict[str, Any], field: str
) -> None:
    """B3, B48"""
    assert refused(post(client, **body)) == (400, field)
    assert delay_kit.scheduled() == []


@pytest.mark.parametrize(
    "payload", ["[" * 100_000 + "]" * 100_000, "[" * 900 + "]" * 900, "9" * 5000, "NaN", "1e999", "{", ""]
)
def test_json_that_cannot_be_stored_is_refused(client: TestClient, payload: str) -> None:
    body = f'{{"channel": "invoices", "payload": {payload}}}'
    answer = client.post("/v1/messages", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert len(answer.text) < 1000


@pytest.mark.parametrize(
    ("given", "body", "field"),
    [
        ("tomorrow", {}, FOR),
        ("", {}, FOR),
        ("2030-01-01T00:00:00", {}, FOR),
        (AT, {"deliver_at": AT}, FOR),
        (AT, {"deliver_after": 5}, FOR),
    ],
)
def test_a_bad_header_is_named(client: TestClient, given: str, body: dict[str, Any], field: str) -> None:
    """B3, B48"""
    assert refused(post(client, given, **body)) == (400, field)


def test_too_soon_and_too_far_are_told_apart(client: TestClient, limit: Limit, delay_kit: DelayTestKit) -> None:
    """B4, B25, B48, B57"""
    limit(min_delay=120, max_delay=3600)
    answer = post(client, "2030-01-01T00:01:59Z")
    assert refused(answer) == (412, "deliver_at")
    assert "less than min_delay (0:02:00) from now" in answer.json()["detail"]
    assert refused(post(client, deliver_after=3601)) == (400, "deliver_at")
    assert delay_kit.scheduled() == []
    assert post(client, deliver_after=120).status_code == 201


def test_a_past_time_is_refused_on_request(client: TestClient) -> None:
    """B58"""
    assert refused(post(client, deliver_at="2029-01-01T00:00:00Z", on_past="fail")) == (412, "deliver_at")
    assert post(client, deliver_at="2029-01-01T00:00:00Z").json()["outcome"] == "dispatched"


def test_a_taken_id_is_a_conflict_unless_it_may_be_kept_or_replaced(
    client: TestClient, delay_kit: DelayTestKit
) -> None:
    """B5, B6"""
    assert post(client, message_id="a", deliver_after=60).status_code == 201
    answer = post(client, message_id="a", deliver_after=90)
    assert refused(answer) == (409, None)
    assert "'a' already exists (SCHEDULED)" in answer.json()["detail"]
    kept = post(client, message_id="a", deliver_after=90, on_conflict="keep")
    assert (kept.status_code, kept.json()["outcome"], kept.headers["location"]) == (200, "kept", "/v1/messages/a")
    assert delay_kit.record("a").message.deliver_at == START + timedelta(seconds=60)
    replaced = post(client, message_id="a", deliver_after=90, on_conflict="replace")
    assert (replaced.status_code, replaced.json()["outcome"]) == (201, "replaced")
    assert delay_kit.record("a").message.deliver_at == START + timedelta(seconds=90)
    assert refused(post(client, message_id="a", channel="orders", on_conflict="keep")) == (409, None)


def test_a_large_payload_is_refused(client: TestClient, limit: Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(max_payload_bytes=10)
    assert refused(post(client, payload="x" * 11)) == (400, "payload")
    assert refused(send(client, b"x" * 11)) == (400, "payload")
    assert send(client, b"x" * 10).status_code == 201
    monkeypatch.setattr(scheduling, "MAX_BODY_BYTES", 5)
    answer = send(client, b"x" * 6)
    assert refused(answer) == (400, "payload")
    assert "is larger than 5 bytes" in answer.json()["detail"]


def test_an_unknown_connection_is_not_found(client: TestClient) -> None:
    answer = post(client, conn_id="nowhere")
    assert refused(answer) == (404, None)
    assert "connection 'nowhere' is not defined" in answer.json()["detail"]


def test_the_embedded_broker_holds_nothing_itself(client: TestClient) -> None:
    answer = post(client, hold="broker")
    assert refused(answer) == (400, None)
    assert "stores messages in the ledger" in answer.json()["detail"]
    assert post(client, hold="ledger").status_code == 201


# -- with a raw body ---------------------------------------------------------------------------------------------------


def test_a_raw_body_is_stored_as_it_is(client: TestClient, delay_kit: DelayTestKit) -> None:
    """B1, B2, B7, B48"""
    answer = send(
        client,
        b"\x00raw\xff",
        **{
            FOR: AT,
            "Content-Type": "image/png",
            "X-Broker-Message-Id": "picture",
            "X-Broker-Priority": "3",
            "X-Broker-Key": "k",
            "X-Broker-Header-Region": "eu",
            "X-Broker-Header-Trace-Id": "1",
        },
    )
    assert (answer.status_code, answer.headers["location"]) == (201, "/v1/messages/picture")
    message = delay_kit.record("picture").message
    assert (message.payload, message.content_type, message.priority, message.key) == (
        b"\x00raw\xff",
        "image/png",
        3,
        "k",
    )
    assert message.headers == {"region": "eu", "trace-id": "1"}
    assert message.deliver_at == START + timedelta(hours=1)


def test_a_channel_may_contain_slashes(client: TestClient, delay_kit: DelayTestKit) -> None:
    message_id = send(client, channel="eu/invoices").json()["message_id"]
    assert delay_kit.record(message_id).message.channel == "eu/invoices"
    assert send(client, channel="eu%2Finvoices").status_code == 201


def test_an_empty_body_is_a_message(client: TestClient, delay_kit: DelayTestKit) -> None:
    message = delay_kit.record(send(client, b"").json()["message_id"]).message
    assert (message.payload, message.content_type) == (b"", "application/octet-stream")


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({FOR: "2030-01-01"}, FOR),
        ({FOR: "soon"}, FOR),
        ({"X-Broker-Priority": "high"}, "priority"),
        ({"X-Broker-Priority": "256"}, "priority"),
        ({"X-Broker-Message-Id": "x" * 256}, "message_id"),
        ({"Content-Type": "x" * 256}, "content_type"),
    ],
)
def test_bad_headers_of_a_raw_body_are_named(client: TestClient, headers: dict[str, str], field: str) -> None:
    """B3, B48"""
    assert refused(send(client, **headers)) == (400, field)


@pytest.mark.parametrize("channel", ["a b", "-a", "x" * 256])
def test_a_bad_channel_of_a_raw_body_is_named(client: TestClient, channel: str) -> None:
    assert refused(send(client, channel=channel)) == (400, "channel")


def test_a_raw_body_has_the_same_conflicts(client: TestClient) -> None:
    """B5"""
    assert send(client, **{FOR: AT, "X-Broker-Message-Id": "a"}).status_code == 201
    assert refused(send(client, **{FOR: AT, "X-Broker-Message-Id": "a"})) == (409, None)
    kept = client.post("/v1/channels/invoices/messages?on_conflict=keep", headers={"X-Broker-Message-Id": "a"})
    assert (kept.status_code, kept.json()["outcome"]) == (200, "kept")


# -- who may schedule --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["viewer", "user"])
def test_only_users_who_may_edit_the_connection_schedule(
    client: TestClient, become: Become, delay_kit: DelayTestKit, role: str
) -> None:
    become(role)
    for answer in (post(client), send(client), post(client, conn_id="nowhere")):
        assert answer.status_code == 403
        assert "You need the right to edit connection" in answer.json()["detail"]
    assert delay_kit.received("invoices") == delay_kit.scheduled() == []


def test_nothing_is_scheduled_without_the_custom_header(client: TestClient, delay_kit: DelayTestKit) -> None:
    del client.headers["X-Requested-With"]
    assert [post(client).status_code, send(client).status_code] == [403, 403]
    assert delay_kit.received("invoices") == []


def test_nobody_schedules_in_the_name_of_a_task(client: TestClient) -> None:
    origin = {"dag_id": OPEN_DAG, "run_id": "r", "task_id": "t", "map_index": -1}
    assert refused(post(client, origin=origin)) == (400, "origin")
