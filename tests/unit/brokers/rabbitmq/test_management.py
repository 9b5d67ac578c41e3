"""The state of destinations, read from answers of the management API."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from airflow_delay_provider.brokers.rabbitmq import management as management_api
from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig
from airflow_delay_provider.brokers.rabbitmq.management import (
    TOTALS_LAG,
    DispatchCheck,
    DispatchStatus,
    count_in_relays,
    measure_clock_skew,
)
from airflow_delay_provider.brokers.rabbitmq.topology import Topology
from airflow_delay_provider.domain.exceptions import BrokerError
from airflow_delay_provider.testing.clock import SettableClock

CONFIG = RabbitMQConfig(management_url="http://somewhere")
NOW = datetime(2030, 1, 1, tzinfo=UTC)
REJECTS = {"x-max-length": 5, "x-overflow": "reject-publish"}


class Management:
    """Answers as the API of a broker with one queue and its relay."""

    def __init__(self) -> None:
        self.queue: dict[str, Any] = {"name": "orders", "type": "classic", "state": "running", "arguments": {}}
        self.held = 0
        self.policies: list[dict[str, Any]] = []
        self.kind = "topic"
        self.bindings: list[dict[str, Any]] = []
        self.fails = False

    def list_queues(self, _config: RabbitMQConfig) -> list[dict[str, Any]]:
        if self.fails:
            raise BrokerError("does not answer")
        relays = [Topology().relay(channel) for channel in ("orders", "events:a.b")]
        return [self.queue, *({"name": name, "messages": self.held} for name in relays)]

    def list_all(self, _config: RabbitMQConfig, kind: str) -> list[dict[str, Any]]:
        found = {"policies": self.policies, "exchanges": [{"name": "events", "type": self.kind}]}
        return found.get(kind, [])

    def list_bindings(self, _config: RabbitMQConfig, _exchange: str) -> list[dict[str, Any]]:
        return self.bindings


@pytest.fixture
def management(monkeypatch: pytest.MonkeyPatch) -> Management:
    made = Management()
    for name in ("list_queues", "list_all", "list_bindings"):
        monkeypatch.setattr(management_api, name, getattr(made, name))
    return made


def checked(channel: str = "orders", *, ago: timedelta = timedelta(0)) -> DispatchStatus:
    return DispatchCheck(CONFIG).check(channel, by=NOW - ago, now=NOW)


def binding(key: str, destination: str = "orders") -> dict[str, Any]:
    return {"routing_key": key, "destination_type": "queue", "destination": destination}


def test_without_management_every_message_is_taken_to_have_arrived() -> None:
    assert DispatchCheck(RabbitMQConfig()).check("orders", by=NOW, now=NOW) is DispatchStatus.TAKEN


@pytest.mark.parametrize(
    "arguments", [{}, {"x-max-length": 5}, {"x-overflow": "reject-publish"}, {"x-max-length": 5, "x-overflow": "drop"}]
)
def test_a_queue_that_cannot_refuse_has_its_messages_at_once(management: Management, arguments: dict[str, Any]) -> None:
    management.queue["arguments"] = arguments
    management.held = 3
    assert checked() is DispatchStatus.TAKEN


@pytest.mark.parametrize("held", [0, 3])
@pytest.mark.parametrize(
    "change",
    [
        {"arguments": REJECTS},
        {"arguments": {"x-max-length-bytes": 5, "x-overflow": "reject-publish-dlx"}},
        {"state": "down"},
        {"name": "another"},
    ],
    ids=str,
)
def test_for_others_a_total_that_is_newer_than_the_record_decides(
    management: Management, change: dict[str, Any], held: int
) -> None:
    management.queue |= change
    management.held = held
    assert checked(ago=TOTALS_LAG - timedelta(seconds=1)) is DispatchStatus.UNKNOWN
    assert checked(ago=TOTALS_LAG) is (DispatchStatus.IN_RELAY if held else DispatchStatus.TAKEN)


def test_a_policy_can_make_a_queue_refuse(management: Management) -> None:
    definition = {"max-length": 5, "overflow": "reject-publish"}
    management.policies = [{"pattern": "^ord", "apply-to": "queues", "priority": 0, "definition": definition}]
    assert checked() is DispatchStatus.UNKNOWN
    management.policies[0]["pattern"] = "^other"
    assert checked() is DispatchStatus.TAKEN


@pytest.mark.parametrize(
    ("kind", "key", "status"),
    [
        ("topic", "a.*", DispatchStatus.TAKEN),
        ("topic", "#.b", DispatchStatus.TAKEN),
        ("topic", "b.*", DispatchStatus.UNKNOWN),
        ("direct", "a.b", DispatchStatus.TAKEN),
        ("direct", "a.*", DispatchStatus.UNKNOWN),
        ("fanout", "", DispatchStatus.TAKEN),
        ("headers", "a.b", DispatchStatus.UNKNOWN),
    ],
)
def test_an_exchange_is_followed_to_its_queues(
    management: Management, kind: str, key: str, status: DispatchStatus
) -> None:
    management.kind, management.bindings = kind, [binding(key)]
    assert checked("events:a.b") is status


def test_an_exchange_is_as_good_as_the_worst_of_its_queues(management: Management) -> None:
    management.bindings = [binding("a.b"), binding("a.b", "gone")]
    assert checked("events:a.b") is DispatchStatus.UNKNOWN


def test_while_the_api_does_not_answer_nothing_is_known_and_the_log_says_so(
    management: Management, caplog: pytest.LogCaptureFixture
) -> None:
    management.fails = True
    assert checked(ago=timedelta(hours=1)) is DispatchStatus.UNKNOWN
    assert "Dispatches are not announced" in caplog.text


def test_messages_in_relays_are_counted_by_channel(management: Management) -> None:
    management.held = 2
    assert count_in_relays(CONFIG) == {"orders": 2, "events:a.b": 2}


def answer_at(monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]) -> None:
    """Let the management API answer with these headers."""
    monkeypatch.setattr(httpx, "get", lambda _url, **_: httpx.Response(200, headers=headers))


@pytest.mark.parametrize(
    ("said", "seconds"), [("00:00:00", 0.5), ("00:01:00", 60.5), ("00:00:00 +0200", -7199.5)], ids=str
)
def test_the_clock_of_the_broker_is_read_from_the_date_of_an_answer(
    monkeypatch: pytest.MonkeyPatch, said: str, seconds: float
):
    zone = "" if "+" in said else " GMT"
    answer_at(monkeypatch, {"date": f"Tue, 01 Jan 2030 {said}{zone}"})
    assert measure_clock_skew(CONFIG, SettableClock(NOW)) == timedelta(seconds=seconds)


@pytest.mark.parametrize("headers", [{}, {"date": "yesterday"}])
def test_the_clock_of_the_broker_is_unknown_without_a_date(monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]):
    answer_at(monkeypatch, headers)
    assert measure_clock_skew(CONFIG, SettableClock(NOW)) is None


def test_the_clock_of_the_broker_is_unknown_without_the_management_api(monkeypatch: pytest.MonkeyPatch):
    assert measure_clock_skew(RabbitMQConfig(), SettableClock(NOW)) is None

    def fail(_url: str, timeout: float) -> httpx.Response:
        raise httpx.ConnectTimeout(f"{timeout}")

    monkeypatch.setattr(httpx, "get", fail)
    assert measure_clock_skew(CONFIG, SettableClock(NOW)) is None
