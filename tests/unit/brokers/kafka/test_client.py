"""What the broker cannot answer yet is asked again, and what it never will is not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from airflow_delay_provider.brokers.kafka import admin
from airflow_delay_provider.brokers.kafka.client import NODE_LEFT, KafkaClients
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.topology import Topic, Topology
from airflow_delay_provider.domain.exceptions import BrokerError

PASSING = [
    KafkaError._TRANSPORT,
    NODE_LEFT,
    KafkaError._TIMED_OUT,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NOT_CONTROLLER,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
]


class Asked:
    """An administrator's client that fails with these codes, one after the other, before it answers."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.made: list[str] = []

    def answer(self, value: Any = None) -> Any:
        if self.codes:
            raise KafkaException(KafkaError(self.codes.pop(0)))
        return value

    def poll(self, _seconds: float) -> int:
        return 0

    def list_topics(self, *_: Any, **__: Any) -> Any:
        topics = {name: type("Known", (), {"partitions": {0: None}, "error": None}) for name in self.made}
        return type("Metadata", (), {"topics": topics})

    def create_topics(self, new: list[Any], **_: Any) -> dict[str, Future[None]]:
        return self._for_each([topic.topic for topic in new], self.made.append)

    def delete_topics(self, names: list[str], **_: Any) -> dict[str, Future[None]]:
        return self._for_each(names, self.made.remove)

    def _for_each(self, names: list[str], change: Callable[[str], None]) -> dict[str, Future[None]]:
        futures: dict[str, Future[None]] = {}
        for name in names:
            futures[name] = Future()
            try:
                self.answer()
            except KafkaException as error:
                futures[name].set_exception(error)
            else:
                change(name)
                futures[name].set_result(None)
        return futures


def link_to(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> KafkaClients:
    clients = KafkaClients(KafkaConfig.from_settings({}, host="localhost"))
    monkeypatch.setattr(clients, "_admin", asked)
    return clients


@pytest.mark.parametrize("code", PASSING)
def test_transient_errors_are_retried(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(code, code)
    assert link_to(asked, monkeypatch).ask(lambda: asked.answer("here"), "looking") == "here"


def test_lasting_errors_are_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._TRANSPORT)
    with pytest.raises(BrokerError, match="looking: user without a login lacks a permission"):
        link_to(asked, monkeypatch).ask(asked.answer, "looking")
    assert asked.codes == [KafkaError._TRANSPORT]


@pytest.mark.parametrize("code", [*PASSING, KafkaError.TOPIC_ALREADY_EXISTS])
def test_topics_are_created_by_a_cluster_that_is_just_losing_a_node(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """D12"""
    asked = Asked(code)
    clients = link_to(asked, monkeypatch)
    if code == KafkaError.TOPIC_ALREADY_EXISTS:
        asked.made.append("one")
    admin.create_topics(clients, Topology(), [Topic(name="one"), Topic(name="two")])
    assert {"one", "two"} <= set(asked.made)


def test_a_topic_that_may_not_be_created_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(BrokerError, match=r"creating topic one: .*lacks a permission"):
        admin.create_topics(link_to(asked, monkeypatch), Topology(), [Topic(name="one")])


def test_a_client_that_has_reached_no_node_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """D12: the library may have forgotten all nodes, and then never finds them again."""
    monkeypatch.setattr("airflow_delay_provider.brokers.kafka.client.ASK_SECONDS", 0.0)
    asked = Asked(KafkaError._TRANSPORT)
    clients = link_to(asked, monkeypatch)
    with pytest.raises(BrokerError, match="cannot be reached"):
        clients.ask(asked.answer, "looking")
    assert clients.admin() is not asked


def test_a_client_that_finds_no_leaders_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    clients = link_to(asked, monkeypatch)
    clients.look_for_leaders()
    assert clients.admin() is asked
    monkeypatch.setattr(asked, "list_topics", lambda **_: Asked(KafkaError._TIMED_OUT).answer())
    clients.look_for_leaders()
    assert clients.admin() is not asked
