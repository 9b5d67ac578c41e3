"""Who holds a message: the setting of the connection and the argument of the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.ledger_held import LedgerHeldBroker
from airflow_delay_provider.brokers.ledger.records import MessageRecord
from airflow_delay_provider.domain.arguments import Hold
from airflow_delay_provider.domain.exceptions import ConfigurationError, InvalidMessageError
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.hooks.delay import DelayHook, open_destination
from airflow_delay_provider.operators.control import CancelMessageOperator, RescheduleMessageOperator
from airflow_delay_provider.operators.schedule import ScheduleMessageOperator
from airflow_delay_provider.sensors.message import MessageDispatchedSensor
from airflow_delay_provider.triggers.broker_thread import BrokerThread
from airflow_delay_provider.triggers.journal_tail import JournalTail
from airflow_delay_provider.triggers.message import MessageDispatchedTrigger
from tests.unit.elsewhere import ElsewhereBroker, define_elsewhere

Define = Callable[..., str]


@pytest.fixture
def ledger(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    """The configured ledger."""
    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", sqlite_url)
    opened = Ledger(sqlite_url)
    yield opened
    opened.close()


@pytest.fixture
def define(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Define:
    """Defines the connection ``far`` of another broker."""
    return lambda **extra: define_elsewhere(monkeypatch, tmp_path, **extra)


def broker_of(conn_id: str, hold: str | None = None) -> type[object]:
    with closing(DelayHook(conn_id, hold=hold)) as hook:
        return type(hook.get_conn())


def record(ledger: Ledger, message_id: str) -> MessageRecord:
    with ledger.read() as connection:
        return listing.get(connection, message_id)


# -- the connection ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "hold", "expected"),
    [
        ({}, None, ElsewhereBroker),
        ({"hold": None}, None, ElsewhereBroker),
        ({"hold": ""}, None, ElsewhereBroker),
        ({"hold": "broker"}, None, ElsewhereBroker),
        ({"hold": "ledger"}, None, LedgerHeldBroker),
        ({}, "ledger", LedgerHeldBroker),
        ({"hold": "ledger"}, "broker", ElsewhereBroker),
        ({"hold": "broker"}, Hold.LEDGER, LedgerHeldBroker),
    ],
)
def test_the_brokers_own_delay_is_preferred_unless_the_connection_or_the_caller_wants_the_ledger(
    define: Define, extra: dict[str, Any], hold: str | None, expected: type[object]
) -> None:
    """A5, A6, A9, A20, A22, D2"""
    assert broker_of(define(**extra), hold) is expected


def test_a_ledger_held_connection_uses_the_configured_ledger_and_its_own_limits(define: Define, ledger: Ledger) -> None:
    with closing(DelayHook(define(hold="ledger", max_payload_bytes=3))) as hook:
        held = hook.get_conn()
        assert isinstance(held, LedgerHeldBroker)
        assert (hook.get_ledger().url, held.destination) == (ledger.url, "far")
        assert held.limits.max_payload_bytes == 3


def test_a_ledger_held_connection_may_have_a_ledger_of_its_own(define: Define, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'own.db'}"
    with closing(DelayHook(define(hold="ledger", ledger_url=url))) as hook:
        assert hook.get_ledger().name == url


def test_the_dispatcher_always_gets_the_plain_broker(define: Define, broker: EmbeddedBroker) -> None:
    """A18: it takes messages out of the ledger, so it must not put them in again."""
    assert type(open_destination(define(hold="ledger"))) is ElsewhereBroker
    assert type(open_destination("delay_default")) is EmbeddedBroker


def test_embedded_messages_are_always_held_in_the_ledger(broker: EmbeddedBroker, connect: Callable[..., None]) -> None:
    assert broker_of("delay_default", "ledger") is EmbeddedBroker
    with pytest.raises(
        ConfigurationError, match=r'hold: .*\'delay_default\' .* stores messages in the ledger; use hold="led'
    ):
        broker_of("delay_default", "broker")
    connect("sqlite://", "wrong", hold="broker")
    with pytest.raises(ConfigurationError, match=r"hold: .*'wrong'"):
        broker_of("wrong")


def test_the_built_in_default_holds_in_the_ledger(ledger: Ledger) -> None:
    assert broker_of("delay_default", "ledger") is EmbeddedBroker
    with pytest.raises(ConfigurationError, match="hold: "):
        broker_of("delay_default", "broker")


def test_a_hold_that_is_unknown_is_refused_with_the_choices(define: Define) -> None:
    """A30"""
    with pytest.raises(InvalidMessageError, match="hold: 'redis' is unknown; use one of broker, ledger"):
        broker_of(define(), "redis")
    with pytest.raises(ConfigurationError, match=r"hold: 'redis' is unknown; use one of .* of connection 'far'"):
        broker_of(define(hold="redis"))


# -- operators ---------------------------------------------------------------------------------------------------


def schedule(context: Any, **options: Any) -> Any:
    given = {"task_id": "remind", "channel": "invoices", "payload": "x", "delay_conn_id": "far", "hold": "ledger"}
    return ScheduleMessageOperator(**given | options).execute(context)


def test_a_message_held_by_the_ledger_is_scheduled_moved_and_cancelled(
    define: Define, ledger: Ledger, context: Any
) -> None:
    """A5, A20, A27, B59"""
    define()
    ids = [schedule(context, message_id=each, deliver_after=3600) for each in ("a", "b")]
    far = {"delay_conn_id": "far", "hold": "ledger"}
    RescheduleMessageOperator(task_id="move", message_ids=ids, deliver_after=7200, **far).execute({})
    CancelMessageOperator(task_id="cancel", message_ids="a", on_too_late="ignore", **far).execute({})
    assert [record(ledger, each).state for each in ids] == [State.CANCELLED, State.SCHEDULED]
    assert record(ledger, "b").destination == "far"


def test_without_hold_the_broker_keeps_it(define: Define, ledger: Ledger, context: Any) -> None:
    """A5"""
    define()
    message_id = schedule(context, deliver_after=3600, hold=None)
    with pytest.raises(AirflowFailException, match="is not known"):
        CancelMessageOperator(task_id="cancel", message_ids=message_id, delay_conn_id="far", hold="ledger").execute({})


@pytest.mark.parametrize(
    "operator",
    [
        ScheduleMessageOperator(task_id="t1", channel="c", payload="x", delay_conn_id="far", hold="redis"),
        CancelMessageOperator(task_id="t2", message_ids="a", delay_conn_id="far", hold="redis"),
        RescheduleMessageOperator(task_id="t3", message_ids="a", expedite=True, delay_conn_id="far", hold="redis"),
        MessageDispatchedSensor(task_id="t4", message_ids="a", delay_conn_id="far", hold="redis"),
    ],
    ids=lambda operator: type(operator).__name__,
)
def test_an_unknown_hold_fails_the_task_at_once(define: Define, context: Any, operator: Any) -> None:
    """A30"""
    define()
    with pytest.raises(AirflowFailException, match="hold: 'redis' is unknown; use one of broker, ledger"):
        operator.execute(context)
    assert "hold" in operator.template_fields


def test_waiting_tasks_read_the_journal_of_the_broker_that_holds_the_message(
    define: Define, ledger: Ledger, context: Any
) -> None:
    define()
    with pytest.raises(TaskDeferred) as scheduling:
        schedule(context, message_id="a", deliver_after=3600, wait_for_dispatch=True)
    sensor = MessageDispatchedSensor(task_id="wait", message_ids="a", delay_conn_id="far", hold="ledger")
    with pytest.raises(TaskDeferred) as sensing:
        sensor.execute({})
    for request in (scheduling, sensing):
        assert request.value.trigger.serialize()[1]["hold"] == "ledger"


async def test_triggers_of_one_connection_share_a_thread_only_with_the_same_hold(define: Define, context: Any) -> None:
    define()
    with (
        JournalTail.shared("far") as plain,
        JournalTail.shared("far", hold="ledger") as held,
        JournalTail.shared("far", hold="ledger") as same,
    ):
        assert held is same
        assert plain is not held
    assert not BrokerThread._running


async def test_the_trigger_finds_and_cancels_in_the_ledger(define: Define, ledger: Ledger, context: Any) -> None:
    """A27"""
    define()
    schedule(context, message_id="now")
    schedule(context, message_id="later", deliver_after=3600)
    far: dict[str, Any] = {"delay_conn_id": "far", "hold": "ledger"}
    trigger = MessageDispatchedTrigger(message_ids=["now"], **far)
    event = await anext(trigger.run())
    assert event.payload["counts"] == {"dispatched": 1}
    await MessageDispatchedTrigger(message_ids=["later"], cancel_on_kill=True, **far).on_kill()
    assert record(ledger, "later").state is State.CANCELLED


def test_a_task_that_is_ended_cancels_in_the_ledger(define: Define, ledger: Ledger, context: Any) -> None:
    define()
    operator = ScheduleMessageOperator(
        task_id="remind",
        channel="c",
        payload="x",
        deliver_after=3600,
        delay_conn_id="far",
        hold="ledger",
        cancel_on_kill=True,
    )
    message_id = operator.execute(context)
    operator.on_kill()
    assert record(ledger, str(message_id)).state is State.CANCELLED


def test_the_decorator_takes_hold(define: Define, ledger: Ledger, context: Any) -> None:
    define()
    with DAG("invoices", schedule=None):

        @task.schedule_message(channel="c", deliver_after=60, delay_conn_id="far", hold="{{ params.hold }}")
        def remind() -> str:
            return "x"

        operator = remind().operator
    context |= {"params": {"hold": "ledger"}}
    operator.render_template_fields(context)
    assert record(ledger, operator.execute(context)).destination == "far"
