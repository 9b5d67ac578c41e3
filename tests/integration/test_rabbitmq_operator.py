"""ScheduleMessageOperator over RabbitMQ, which knows no ids: the next try continues where the last one ended."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.execution_time.context import set_current_context

from airflow_delay_provider import DelayHook
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.domain.exceptions import BrokerError
from airflow_delay_provider.hooks import task
from airflow_delay_provider.operators.control import CancelMessageOperator
from airflow_delay_provider.operators.schedule import ScheduleMessageOperator
from airflow_delay_provider.testing.task_run import TaskInstanceStub
from tests.rabbits import config_of, connection_of, declare_queue, fresh_vhost
from tools.servers.component import wait_for

CHANNEL = "orders"
#: One tick, and so one queue for all messages of a test.
TICK_SECONDS = 3
FITS = 20


class StateStore(dict[str, Any]):
    """Airflow's store, as far as it is used: JSON by key."""

    def set(self, key: str, value: Any) -> None:
        self[key] = json.loads(json.dumps(value))


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A vhost whose ladder takes few messages at a time, behind the connection ``rabbit``."""
    settings = {"tick": TICK_SECONDS, "max_length": FITS}
    with fresh_vhost() as url:
        monkeypatch.setenv("AIRFLOW_CONN_RABBIT", json.dumps(connection_of(url, **settings)))
        declare_queue(url, CHANNEL)
        with RabbitMQBroker(config_of(url, **settings)) as broker:
            broker.create_topology([CHANNEL])
        yield url


def run(store: StateStore, messages: list[dict[str, Any]], **options: Any) -> Any:
    """One try of the task."""
    operator = ScheduleMessageOperator(
        task_id="bulk", delay_conn_id="rabbit", channel=CHANNEL, messages=messages, **options
    )
    ti = TaskInstanceStub(dag_id="d", task_id="bulk", run_id="r", map_index=-1, results={})
    return operator.execute({"ti": ti, "task_state_store": store})  # type: ignore[typeddict-item]


def numbered(n: int) -> list[dict[str, Any]]:
    return [{"payload": number, "deliver_after": TICK_SECONDS / 2} for number in range(n)]


def received(url: str, n: int) -> Counter[str]:
    with RabbitMQBroker(config_of(url)) as broker:
        found: Counter[str] = Counter()

        def all_there() -> bool:
            deliveries = broker.receive(CHANNEL, limit=1000)
            found.update(delivery.message.id for delivery in deliveries)
            broker.ack(deliveries)
            return found.total() >= n

        wait_for(all_there, what=f"{n} messages in {CHANNEL}", seconds=60)
        return found


def test_a_try_after_a_refusal_publishes_only_unconfirmed_messages(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A28, C11, C14: a full queue refuses, the task fails with the ids, and its next try completes the batch."""
    monkeypatch.setattr(task, "BATCH", 5)
    store, messages = StateStore(), numbered(FITS + 15)
    with pytest.raises(BrokerError, match="a queue is full") as refused:
        run(store, messages)
    confirmed = len(messages) - len(refused.value.unconfirmed)
    assert 0 < confirmed < len(messages)
    assert received(url, confirmed).total() == confirmed

    ids = run(store, messages)
    rest = received(url, len(messages) - confirmed)
    assert rest == Counter(refused.value.unconfirmed)
    assert set(rest) < set(ids)


def test_a_task_that_finds_its_confirmed_ids_in_its_state_store_publishes_nothing_again_and_says_so(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A28"""
    store, messages = StateStore(), numbered(5)
    ids = run(store, messages)
    assert "Skipped" not in capsys.readouterr().out
    assert run(store, messages) == ids
    assert "Skipped 5 messages that an earlier run of this task has scheduled" in capsys.readouterr().out
    assert received(url, 5) == Counter(ids)
    with RabbitMQBroker(config_of(url)) as broker:
        assert broker.receive(CHANNEL) == []


def test_a_retried_task_that_calls_the_hook_publishes_nothing_again(url: str) -> None:
    """A28"""
    store, ti = StateStore(), TaskInstanceStub(dag_id="d", task_id="hook", run_id="r", map_index=-1, results={})
    tries: list[list[str]] = []
    for ti.try_number in (1, 2):
        context: Any = {"ti": ti, "task_state_store": store}
        with set_current_context(context), closing(DelayHook("rabbit")) as hook:
            tries.append([hook.schedule_message(CHANNEL, number, deliver_after=1) for number in range(2)])
    assert tries[0] == tries[1]
    assert received(url, 2) == Counter(tries[0])
    with RabbitMQBroker(config_of(url)) as broker:
        assert broker.receive(CHANNEL) == []


def test_other_messages_of_the_same_task_are_not_taken_for_the_confirmed_ones(url: str) -> None:
    """A28: confirmed messages are known by their ids, not by their number."""
    store = StateStore()
    run(store, [{"payload": 1, "message_id": "first"}])
    run(store, [{"payload": 1, "message_id": "second"}])
    assert received(url, 2) == Counter(["first", "second"])


def test_one_bad_message_far_back_keeps_all_from_being_published(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A29"""
    monkeypatch.setattr(task, "BATCH", 2)
    messages = [*numbered(6), {"payload": "x", "headers": {"x-death": "1"}}]
    with pytest.raises(AirflowFailException, match="headers: 'x-death' is reserved"):
        run(StateStore(), messages)
    with RabbitMQBroker(config_of(url)) as broker:
        assert broker.read_journal(after="") == []


def test_a_conflict_policy_that_rabbitmq_cannot_keep_is_refused_with_the_remedy(url: str) -> None:
    """A28"""
    with pytest.raises(AirflowFailException, match=r'on_conflict: .*use on_conflict="keep", or hold="ledger"'):
        run(StateStore(), numbered(1), on_conflict="replace")


def test_cancelling_on_kill_is_refused_where_nothing_can_be_called_back(url: str) -> None:
    """A27"""
    with pytest.raises(AirflowFailException, match=r'cancel_on_kill: this broker holds .*; add hold="ledger"'):
        run(StateStore(), numbered(1), cancel_on_kill=True)


@pytest.mark.parametrize("on_too_late", ["fail", "ignore"])
def test_cancelling_a_message_that_rabbitmq_holds_is_refused_with_the_remedy(url: str, on_too_late: str) -> None:
    """A27, C13"""
    ids = run(StateStore(), numbered(3))
    operator = CancelMessageOperator(task_id="c", delay_conn_id="rabbit", message_ids=ids, on_too_late=on_too_late)
    with pytest.raises(
        AirflowFailException, match=r'is held by RabbitMQ itself and cannot be cancelled.*hold="ledger"'
    ):
        operator.execute({})
