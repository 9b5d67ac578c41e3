"""Operators, sensors and the hook over Kafka, with a dispatcher that serves its ladder."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from airflow_delay_provider.domain.exceptions import DeferMessage
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change
from airflow_delay_provider.hooks import task
from airflow_delay_provider.hooks.kafka import KafkaHook
from airflow_delay_provider.operators.control import CancelMessageOperator, RescheduleMessageOperator
from airflow_delay_provider.operators.schedule import ScheduleMessageOperator
from airflow_delay_provider.testing.task_run import TaskInstanceStub
from airflow_delay_provider.triggers.message import MessageDispatchedTrigger
from tests.integration.kafka_with_dispatcher import CONN_ID, Stream, stream_with_dispatcher
from tests.kafkas import connection_of
from tools.servers.process import free_port

HOUR = 3600


class StateStore(dict[str, Any]):
    """Airflow's store, as far as it is used: JSON by key."""

    def set(self, key: str, value: Any) -> None:
        self[key] = json.loads(json.dumps(value))


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stream]:
    ledger: Path = tmp_path_factory.mktemp("stream") / "ledger.db"
    with stream_with_dispatcher(f"sqlite:///{ledger}") as served:
        yield served


@pytest.fixture
def channel(stream: Stream) -> str:
    return stream.topic()


def schedule(channel: str, *, store: StateStore | None = None, **options: Any) -> Any:
    """One try of the task."""
    operator = ScheduleMessageOperator(task_id="remind", delay_conn_id=CONN_ID, channel=channel, **options)
    ti = TaskInstanceStub(dag_id="d", task_id="remind", run_id=channel, map_index=-1, results={})
    return operator.execute({"ti": ti, "task_state_store": store})  # type: ignore[typeddict-item]


def numbered(n: int, after: float) -> list[dict[str, Any]]:
    return [{"payload": number, "deliver_after": after} for number in range(n)]


def outcome(stream: Stream, message_id: str) -> Change:
    with stream.open() as broker:
        return broker.find_outcomes([message_id], since=FROM_THE_START)[message_id].change


# -- scheduling ----------------------------------------------------------------------------------------------------


def test_messages_of_a_task_arrive_once_each_when_they_are_due(stream: Stream, channel: str) -> None:
    """A5, A6"""
    ids = schedule(channel, messages=numbered(30, after=3))
    with stream.open() as broker:
        seen = broker.peek(channel, limit=10)
        now = broker.clock.now()
        assert [message.id for message in seen if message.deliver_at > now] == []
    assert Counter(message.id for message in stream.received(channel, 30)) == Counter(ids)


def test_a_task_that_finds_its_confirmed_ids_in_its_state_store_publishes_nothing_again(
    stream: Stream, channel: str
) -> None:
    """A28"""
    store, messages = StateStore(), numbered(5, after=1)
    ids = schedule(channel, messages=messages, store=store)
    assert schedule(channel, messages=messages, store=store) == ids
    assert sorted(message.id for message in stream.received(channel, 5)) == sorted(ids)


def test_one_bad_message_far_back_keeps_all_from_being_published(
    stream: Stream, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A29"""
    monkeypatch.setattr(task, "BATCH", 2)
    with stream.open() as broker:
        before = broker.journal_end()
        with pytest.raises(AirflowFailException, match="headers: 'delay-id' is reserved"):
            schedule(channel, messages=[*numbered(6, after=0), {"payload": "x", "headers": {"delay-id": "1"}}])
        assert [entry for entry in broker.read_journal(after=before) if entry.channel == channel] == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"on_conflict": "replace"}, r'on_conflict: .*use on_conflict="keep", or hold="ledger"'),
        ({"payload": "x" * 1_100_000}, "max_payload_bytes"),
    ],
    ids=["conflict", "size"],
)
def test_requests_that_kafka_cannot_serve_fail_the_task_at_once_with_the_remedy(
    stream: Stream, channel: str, options: dict[str, Any], problem: str
) -> None:
    """A12, A28"""
    with pytest.raises(AirflowFailException, match=problem):
        schedule(channel, **{"payload": "x", "deliver_after": HOUR} | options)


def test_a_topic_that_does_not_exist_fails_the_task_at_once(stream: Stream) -> None:
    """A12"""
    with pytest.raises(AirflowFailException, match=r"channel: Kafka at .* has no topic 'no-such-topic'; create it"):
        schedule("no-such-topic", payload="x", deliver_after=HOUR)
    with pytest.raises(AirflowFailException, match="channel: 'shop:orders' cannot be a Kafka topic"):
        schedule("shop:orders", payload="x", deliver_after=HOUR)


def test_the_ledger_holds_messages_for_kafka_until_the_dispatcher_sends_them(
    stream: Stream, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A5, A18, A20"""
    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", stream.ledger_url)
    message_id = schedule(channel, payload="x", deliver_after=1, hold="ledger", on_conflict="fail")
    assert [message.id for message in stream.received(channel, 1)] == [message_id]


# -- waiting -------------------------------------------------------------------------------------------------------


async def test_a_deferred_task_is_resumed_by_the_dispatch(stream: Stream, channel: str) -> None:
    """A2"""
    with pytest.raises(TaskDeferred) as deferred:
        schedule(channel, payload="x", deliver_after=5, wait_for_dispatch=True)
    path, kwargs = deferred.value.trigger.serialize()
    assert path.endswith("MessageDispatchedTrigger")
    event = await anext(MessageDispatchedTrigger(**kwargs).run())
    assert event.payload["counts"] == {"dispatched": 1}
    [message] = stream.received(channel, 1)
    assert (message.origin and message.origin.task_id, message.payload) == ("remind", b"x")


# -- control -------------------------------------------------------------------------------------------------------


def test_messages_that_wait_in_kafka_are_cancelled_moved_and_hurried(stream: Stream, channel: str) -> None:
    """A20, A27, B59"""
    ids = {
        name: schedule(channel, message_id=f"{channel}-{name}", payload=name, deliver_after=HOUR)
        for name in ("cancelled", "moved", "hurried")
    }
    kafka: dict[str, Any] = {"delay_conn_id": CONN_ID}
    CancelMessageOperator(task_id="cancel", message_ids=ids["cancelled"], **kafka).execute({})
    RescheduleMessageOperator(task_id="move", message_ids=ids["moved"], deliver_after=2, **kafka).execute({})
    RescheduleMessageOperator(task_id="hurry", message_ids=ids["hurried"], expedite=True, **kafka).execute({})
    assert {message.payload for message in stream.received(channel, 2)} == {b"hurried", b"moved"}
    assert outcome(stream, ids["cancelled"]) is Change.CANCELLED


def test_dispatched_messages_cannot_be_cancelled_and_may_be_ignored(stream: Stream, channel: str) -> None:
    """A27"""
    gone = schedule(channel, payload="x")
    waiting = schedule(channel, message_id=f"{channel}-waits", payload="y", deliver_after=HOUR)
    kafka: dict[str, Any] = {"delay_conn_id": CONN_ID, "message_ids": [gone, waiting]}
    with pytest.raises(AirflowFailException, match=r"is DISPATCHED since .* and cannot be cancelled any more"):
        CancelMessageOperator(task_id="cancel", **kafka).execute({})
    CancelMessageOperator(task_id="cancel", on_too_late="ignore", **kafka).execute({})
    CancelMessageOperator(task_id="cancel", on_too_late="ignore", **kafka).execute({})
    stream.received(channel, 1)


def test_an_unknown_id_is_refused(stream: Stream) -> None:
    with pytest.raises(AirflowFailException, match="message 'nobody' is not known"):
        CancelMessageOperator(task_id="cancel", delay_conn_id=CONN_ID, message_ids="nobody").execute({})


def test_a_task_that_is_ended_cancels_its_message(stream: Stream, channel: str) -> None:
    """A27"""
    operator = ScheduleMessageOperator(
        task_id="t", channel=channel, payload="x", deliver_after=HOUR, delay_conn_id=CONN_ID, cancel_on_kill=True
    )
    ti = TaskInstanceStub(dag_id="d", task_id="t", run_id=channel, map_index=-1, results={})
    message_id = operator.execute({"ti": ti})  # type: ignore[typeddict-item]
    operator.on_kill()
    assert outcome(stream, message_id) is Change.CANCELLED


# -- the hook ------------------------------------------------------------------------------------------------------


def test_the_hook_schedules_and_consumes_and_a_deferred_message_comes_again(stream: Stream, channel: str) -> None:
    """A24, A25"""
    seen: list[tuple[bytes, int]] = []

    def handle(message: Any) -> None:
        seen.append((message.payload, message.handled_count))
        if message.payload == b"bad":
            raise ValueError("no good")
        if message.handled_count == 0:
            raise DeferMessage(1)

    with closing(KafkaHook(CONN_ID)) as hook:
        hook.schedule([hook.compose(channel, payload, deliver_after=1) for payload in ("good", "bad")])
        done = hook.consume(channel, handle, limit=3, timeout=timedelta(seconds=90))
        assert (done.handled, done.deferred, done.dead_lettered) == (1, 1, 1)
        [dead] = stream.received(f"{channel}.dead", 1)
    assert Counter(seen) == Counter([(b"good", 0), (b"good", 1), (b"bad", 0)])
    assert (dead.payload, dead.channel) == (b"bad", channel)


@pytest.mark.parametrize(
    ("change", "works", "answer"),
    [
        ({}, True, r"^Kafka at .*: answers; the ladder delay.v1.surface-\w+ is ready$"),
        ({"ladder": "not-there"}, True, "the ladder delay.v1.not-there is created with the first message$"),
        ({"partitions": "many"}, False, "^partitions: 'many' is not a number"),
        ({"compression.type": "best"}, False, 'Invalid value "best" for .*; correct the connection\'s extra$'),
    ],
    ids=["ready", "new", "wrong", "unknown to the library"],
)
def test_the_test_button_of_the_connection_form_reports_the_result(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], works: bool, answer: str
) -> None:
    """A12"""
    connection = connection_of(stream.bootstrap, **stream.settings | change)
    monkeypatch.setenv("AIRFLOW_CONN_FORM", json.dumps(connection))
    with closing(KafkaHook("form")) as hook:
        said = hook.test_connection()
    assert said[0] is works, said
    assert re.search(answer, said[1]), said


def test_a_broker_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A12"""
    connection = connection_of(f"127.0.0.1:{free_port()}") | {"login": "me", "password": "s3cret"}
    monkeypatch.setenv("AIRFLOW_CONN_FORM", json.dumps(connection))
    with closing(KafkaHook("form")) as hook:
        works, said = hook.test_connection()
    assert not works
    assert "cannot be reached" in said
    assert "s3cret" not in said
