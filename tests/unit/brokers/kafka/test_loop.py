"""A dispatcher whose client library has lost all nodes, or cannot undo a transaction."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
from confluent_kafka import KafkaError, KafkaException

from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.dispatch.loop import KafkaLadderDispatcher
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.domain.exceptions import BrokerError


class Lost:
    """A consumer and a transaction in one that reach no node."""

    is_open = True
    is_committing = False

    def __init__(self, code: int) -> None:
        self._code = code
        self.ended: list[str] = []

    def seconds_left(self) -> float:
        return 0.0

    def poll(self, _seconds: float) -> NoReturn:
        raise KafkaException(KafkaError(self._code))

    def assignment(self) -> list[Any]:
        return []

    def abort(self) -> None:
        self.ended.append("abort")

    def give_up(self) -> None:
        self.ended.append("give up")

    def close(self) -> None:
        self.ended.append("close")


@pytest.mark.parametrize("code", [KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN])
def test_clients_that_reach_no_node_are_not_used_again(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """D12: the library may have forgotten all nodes, and then never finds them again."""
    lost, clients = Lost(code), KafkaClients(KafkaConfig.from_settings({}, host="localhost"))
    dispatcher = KafkaLadderDispatcher(clients, SystemClock())
    monkeypatch.setattr(dispatcher, "_consumer", lost)
    monkeypatch.setattr(dispatcher, "_transaction", lost)
    with pytest.raises(BrokerError) as raised:
        dispatcher.run_once()
    assert raised.value.may_pass
    assert lost.ended == ["give up", "close"]


def test_an_error_of_the_group_is_undone_with_the_same_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, clients = Lost(KafkaError.ILLEGAL_GENERATION), KafkaClients(KafkaConfig.from_settings({}, host="localhost"))
    dispatcher = KafkaLadderDispatcher(clients, SystemClock())
    monkeypatch.setattr(dispatcher, "_consumer", lost)
    monkeypatch.setattr(dispatcher, "_transaction", lost)
    dispatcher.run_once()
    assert lost.ended == ["abort"]


class Unknown(Lost):
    """One whose transaction the broker knows nothing of."""

    def abort(self) -> NoReturn:
        raise KafkaException(KafkaError(KafkaError.INVALID_TXN_STATE, "no such transaction", fatal=True))


def test_a_transaction_that_the_broker_does_not_know_costs_the_producer_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The partitions are kept: to join the group again takes a second."""
    unknown, another = Unknown(KafkaError._STATE), Lost(KafkaError._STATE)
    dispatcher = KafkaLadderDispatcher(KafkaClients(KafkaConfig.from_settings({}, host="localhost")), SystemClock())
    monkeypatch.setattr(dispatcher, "_consumer", unknown)
    monkeypatch.setattr(dispatcher, "_transaction", unknown)
    monkeypatch.setattr(dispatcher, "_open_transaction", lambda _channels: another)
    dispatcher.run_once()
    assert unknown.ended == ["give up"]
    assert (dispatcher._consumer, dispatcher._transaction) == (unknown, another)


def test_partitions_that_are_lost_take_the_open_transaction_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: another dispatcher has them already, and would send their messages, too."""
    lost = Lost(KafkaError._TRANSPORT)
    dispatcher = KafkaLadderDispatcher(KafkaClients(KafkaConfig.from_settings({}, host="localhost")), SystemClock())
    monkeypatch.setattr(dispatcher, "_transaction", lost)
    dispatcher._on_lost(Any, [])
    assert lost.ended == ["abort"]
