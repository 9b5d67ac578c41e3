"""The operator that schedules."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from urllib.parse import parse_qsl

import pytest
from airflow.sdk import DAG
from airflow.sdk.bases.operator import TriggerFailureReason
from airflow.sdk.exceptions import AirflowFailException, TaskDeferralTimeout, TaskDeferred
from airflow.sdk.execution_time.xcom import XCom

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.exceptions import (
    ConfigurationError,
    InvalidMessageError,
    LedgerError,
    UnknownMessageError,
    WaitTimeoutError,
)
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import Message, Origin
from airflow_delay_provider.links import messages_url
from airflow_delay_provider.operators.schedule import ScheduleMessageOperator
from airflow_delay_provider.triggers.message import MessageDispatchedTrigger
from tests.heartbeats import write_heartbeat
from tests.unit.airflow.conftest import TaskInstance

TOMORROW = datetime.now(UTC) + timedelta(days=1)


def schedule(context: Any, **options: Any) -> Any:
    return ScheduleMessageOperator(task_id="remind", **{"channel": "invoices", "payload": "x"} | options).execute(
        context
    )


def record(broker: EmbeddedBroker, message_id: str) -> Any:
    with broker.ledger.read() as connection:
        return listing.get(connection, message_id)


def known(broker: EmbeddedBroker) -> int:
    with broker.ledger.read() as connection:
        return sum(listing.count_by_state(connection).values())


def test_one_message_is_scheduled_with_all_its_fields(broker: EmbeddedBroker, context: Any) -> None:
    """B7, B8, D1"""
    message_id = schedule(
        context,
        payload={"invoice": 7},
        deliver_at=TOMORROW,
        key="customer-1",
        headers={"trace": "abc"},
        priority=5,
    )

    stored = record(broker, message_id).message
    assert (stored.channel, stored.payload, stored.key) == ("invoices", b'{"invoice":7}', "customer-1")
    assert (stored.headers, stored.content_type, stored.priority) == ({"trace": "abc"}, "application/json", 5)
    assert timedelta(0) <= stored.deliver_at - TOMORROW < timedelta(milliseconds=1)
    assert stored.origin == Origin(dag_id="invoices", run_id="manual__2030-01-01", task_id="remind")


def test_many_messages_take_the_operators_fields_as_defaults(broker: EmbeddedBroker, context: Any) -> None:
    """B59: bulk"""
    ids = schedule(
        context,
        deliver_after=3600,
        headers={"trace": "abc"},
        messages=[
            {"payload": "a"},
            {"payload": "b", "channel": "letters", "deliver_at": TOMORROW.isoformat()},
            {"payload": "c", "message_id": "own-id"},
        ],
    )

    first, second, third = (record(broker, message_id).message for message_id in ids)
    assert (first.channel, second.channel, ids[2]) == ("invoices", "letters", "own-id")
    assert second.deliver_at - first.deliver_at > timedelta(hours=20)
    assert third.headers == {"trace": "abc"}


def test_an_empty_list_schedules_nothing_and_succeeds(broker: EmbeddedBroker, context: Any) -> None:
    assert schedule(context, messages=[]) == []
    assert schedule(context, messages=[], wait_for_dispatch=True) == []
    assert known(broker) == 0


def test_a_retried_or_cleared_task_schedules_nothing_twice(broker: EmbeddedBroker, context: Any) -> None:
    first = schedule(context, payload="x", deliver_after=60)
    again = schedule(context, payload="x", deliver_after=60)

    assert first == again
    assert known(broker) == 1


def test_runs_tasks_and_mapped_instances_have_their_own_messages(broker: EmbeddedBroker) -> None:
    instances = [
        TaskInstance(),
        TaskInstance(run_id="manual__2030-01-02"),
        TaskInstance(task_id="warn"),
        TaskInstance(map_index=0),
        TaskInstance(map_index=1),
    ]
    ids = {schedule({"ti": ti}, payload="x", deliver_after=60) for ti in instances}

    assert len(ids) == known(broker) == len(instances)


def test_a_message_without_a_time_goes_straight_to_its_channel(
    broker: EmbeddedBroker, context: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A10"""
    message_id = schedule(context, payload="now")

    assert record(broker, message_id).state is State.DISPATCHED
    assert [message.id for message in broker.peek("invoices")] == [message_id]
    assert "scheduled 0, dispatched 1, kept 0, replaced 0" in capsys.readouterr().out


def test_the_link_leads_to_the_message(
    broker: EmbeddedBroker, context: Any, ti: TaskInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule(context, payload="x", message_id="a/b c")
    assert ti.pushed == {"delayed_message_link": "/plugin/delayed-messages/messages/a%2Fb%20c"}

    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example/team/")
    schedule(context, payload="x", message_id="d")
    assert ti.pushed == {"delayed_message_link": "https://airflow.example/team/plugin/delayed-messages/messages/d"}


def test_the_link_of_a_task_with_many_messages_leads_to_their_list(
    broker: EmbeddedBroker, context: Any, ti: TaskInstance
) -> None:
    task = ScheduleMessageOperator(
        task_id="remind", channel="invoices", payload="x", messages=[{"deliver_after": n} for n in (60, 120)]
    )
    task.execute(context)
    filters = {"dag_id": ti.dag_id, "run_id": ti.run_id, "task_id": ti.task_id}
    path, _, query = ti.pushed["delayed_message_link"].partition("?")
    assert (path, dict(parse_qsl(query))) == ("/plugin/delayed-messages/messages", filters)
    assert "+" not in messages_url(Origin(dag_id="d", run_id="manual__2030-01-01T00:00:00+00:00", task_id="t"))
    assert messages_url(Origin(dag_id="d", run_id="r", task_id="t"), "rabbit").endswith("&conn_id=rabbit")


def test_the_link_of_a_task_that_ends_is_the_one_it_stored(
    broker: EmbeddedBroker, context: Any, ti: TaskInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow asks for the link once more when a task ends and stores the answer over the first one."""
    monkeypatch.setattr(XCom, "get_value", lambda *, ti_key, key: ti_key.pushed.get(key))
    (link,) = ScheduleMessageOperator.operator_extra_links
    operator = ScheduleMessageOperator(task_id="remind", channel="invoices", payload=None, message_id="a")
    resumed = ScheduleMessageOperator(task_id="remind", channel="invoices", payload=None, message_id="a")
    refused = ScheduleMessageOperator(task_id="remind", channel="not a channel", payload=None)

    operator.execute(context)
    with pytest.raises(AirflowFailException):
        refused.execute(context)

    ends = [link.get_link(each, ti_key=ti) for each in (operator, resumed, refused)]
    assert ends == ["/plugin/delayed-messages/messages/a", "/plugin/delayed-messages/messages/a", ""]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("form", ["{{ data_interval_end }}", "{{ data_interval_end.isoformat() }}"])
def test_templates_are_rendered_everywhere(broker: EmbeddedBroker, ti: TaskInstance, native: bool, form: str) -> None:
    with DAG("invoices", render_template_as_native_obj=native, schedule=None):
        operator = ScheduleMessageOperator(
            task_id="remind",
            channel="{{ params.region }}.invoices",
            messages=[{"payload": {"run": "{{ run_id }}"}, "headers": {"run": "{{ run_id }}"}, "deliver_at": form}],
            priority="{{ 2 + 3 }}",
            on_conflict="{{ 'keep' }}",
        )
    context: Any = {
        "ti": ti,
        "run_id": "run-1",
        "params": {"region": "eu"},
        "data_interval_end": TOMORROW.replace(microsecond=0),
    }
    operator.render_template_fields(context)
    (message_id,) = operator.execute(context)

    stored = record(broker, message_id).message
    assert (stored.channel, stored.payload, stored.headers) == ("eu.invoices", b'{"run":"run-1"}', {"run": "run-1"})
    assert (stored.deliver_at, stored.priority) == (TOMORROW.replace(microsecond=0), 5)


BAD_INPUTS: list[tuple[dict[str, Any], str]] = [
    (
        {"deliver_at": "{{ ts }}", "deliver_after": 60},
        "deliver_at: deliver_after is given, too; give only one of them",
    ),
    ({"channel": "no spaces please"}, "channel: 'no spaces please' is not a valid channel name; use 1-255 letters"),
    ({"channel": "{{ none }}"}, "channel: '{{ none }}' is not a valid channel name; use 1-255 letters"),
    ({"messages": [{"payload": 1}], "channel": None}, "messages[0]: channel: None is not a valid channel name"),
    ({"payload": "x" * 1001}, "payload: 1001 bytes are more than max_payload_bytes (1000); send a reference"),
    ({"payload": object()}, "payload: object cannot be written as JSON"),
    ({"payload": float("nan")}, "payload: float cannot be written as JSON"),
    ({"headers": {"count": 1}}, "headers: 'count': 1 is not text; use str"),
    ({"priority": "high"}, "priority: 'high' is not a whole number; use 0 to 255"),
    ({"message_id": ""}, "message_id: '' is not a valid id; use 1-255 printable characters"),
    ({"deliver_after": -60, "on_past": "fail"}, 'has passed; choose a later time, or use on_past="deliver"'),
    ({"deliver_after": timedelta(days=3)}, "is more than max_delay (2 days, 0:00:00) from now; choose an earlier time"),
    ({"deliver_after": 10}, "is less than min_delay (0:01:00) from now; choose a later time, or lower min_delay"),
    ({"on_past": "ignore"}, "on_past: 'ignore' is unknown; use one of deliver, fail"),
    ({"on_conflict": "skip"}, "on_conflict: 'skip' is unknown; use one of keep, fail, replace"),
    ({"messages": ["text"]}, "messages: item 0 is str; use dicts such as {'channel': 'invoices'}"),
    ({"messages": [{"delay": 3}]}, "messages: item 0 has 'delay'; use channel, payload, deliver_at, deliver_after"),
    (
        {"messages": [{}], "message_id": "a"},
        "message_id: one id cannot name many messages; give each message its own id, or none",
    ),
    (
        {"messages": [{"message_id": "a"}, {"message_id": "a"}]},
        "message_id: 'a' is given twice; use a different id for each message",
    ),
    ({"messages": [{}, {"priority": 256}]}, "messages[1]: priority: 256 is out of range; use 0 to 255"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD_INPUTS, ids=[sentence for _, sentence in BAD_INPUTS])
def test_bad_input_fails_at_once_with_one_sentence_and_writes_nothing(
    broker: EmbeddedBroker, context: Any, connect: Callable[..., None], options: dict[str, Any], sentence: str
) -> None:
    """A30, B3, B4: the sentence names the field and the remedy."""
    connect(str(broker.ledger.url), min_delay=60, max_delay=timedelta(days=2).total_seconds(), max_payload_bytes=1000)
    default = {} if {"deliver_at", "deliver_after"} & set(options) else {"deliver_after": 3600}

    with pytest.raises(AirflowFailException) as failure:
        schedule(context, **{"payload": "x"} | default | options)

    assert sentence in str(failure.value)
    assert "\n" not in str(failure.value)
    assert known(broker) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"channel": None}, 'channel: missing; give one, such as channel="invoices"'),
        ({"payload": ...}, "payload: missing; give one; payload=None sends null"),
        ({"deliver_at": TOMORROW, "deliver_after": 60}, "deliver_at: deliver_after is given, too"),
        ({"deliver_at": TOMORROW.isoformat(), "deliver_after": 60}, "deliver_at: deliver_after is given, too"),
        ({"deliver_at": "2030-01-01T00:00:00"}, "deliver_at: 2030-01-01T00:00:00 has no time zone; add one"),
        ({"deliver_at": "tomorrow"}, "deliver_at: 'tomorrow' is not a time; use an aware datetime or ISO-8601"),
        ({"deliver_after": "soon"}, "deliver_after: 'soon' is not a delay; use a timedelta or a number of seconds"),
        ({"deliver_at": datetime(2030, 1, 1)}, "deliver_at: 2030-01-01T00:00:00 has no time zone"),  # noqa: DTZ001
    ],
)
def test_what_no_template_can_make_right_is_an_error_of_the_dag(options: dict[str, Any], sentence: str) -> None:
    given = {"task_id": "remind", "channel": "invoices", "payload": "x"} | options
    with pytest.raises(InvalidMessageError, match=re.escape(sentence)):
        ScheduleMessageOperator(**{name: value for name, value in given.items() if value is not ...})


def test_a_message_of_many_without_a_payload_is_refused(broker: EmbeddedBroker, context: Any) -> None:
    operator = ScheduleMessageOperator(task_id="remind", channel="invoices", messages=[{"payload": None}, {}])
    with pytest.raises(AirflowFailException, match=re.escape("messages[1]: payload: missing")):
        operator.execute(context)
    assert known(broker) == 0


def test_the_log_names_channel_and_ids(
    broker: EmbeddedBroker, context: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = schedule(context, messages=[{"payload": number} for number in range(7)])
    assert f"channel invoices; id {', '.join(ids[:5])} and 2 more" in capsys.readouterr().out


def test_one_bad_message_among_many_stops_all(broker: EmbeddedBroker, context: Any) -> None:
    with pytest.raises(AirflowFailException, match="channel"):
        schedule(context, messages=[{"payload": "good"}, {"payload": "bad", "channel": "not a channel"}])
    assert known(broker) == 0


def test_a_taken_id_fails_when_asked_to(broker: EmbeddedBroker, context: Any) -> None:
    """A28, B5"""
    schedule(context, payload="first", deliver_after=60, message_id="taken")

    with pytest.raises(AirflowFailException, match=r"'taken' already exists \(SCHEDULED\); use another message_id"):
        schedule(
            context,
            messages=[{"payload": "new"}, {"payload": "second", "message_id": "taken"}],
            deliver_after=60,
            on_conflict="fail",
        )
    assert known(broker) == 1
    assert record(broker, "taken").message.payload == b"first"


def test_a_taken_id_can_be_replaced(broker: EmbeddedBroker, context: Any, capsys: pytest.CaptureFixture[str]) -> None:
    schedule(context, payload="first", deliver_after=60, message_id="taken")
    schedule(context, payload="second", deliver_after=60, message_id="taken", on_conflict="replace")

    assert record(broker, "taken").message.payload == b"second"
    assert "scheduled 0, dispatched 0, kept 0, replaced 1" in capsys.readouterr().out


def test_an_unknown_connection_is_named_with_its_remedy(context: Any) -> None:
    """A12: can be retried, because Airflow says the same if its API is down."""
    with pytest.raises(ConfigurationError, match=r"'nowhere' is not defined.*add nowhere .* where TYPE is rabbitmq, "):
        schedule(context, payload="x", delay_conn_id="nowhere")


def test_a_connection_of_another_type_is_named(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", "http://example.test")
    with pytest.raises(ConfigurationError, match=r"connection 'other' has type 'http'; use one of delay"):
        schedule(context, payload="x", delay_conn_id="other")


def test_a_database_that_is_down_can_be_tried_again(context: Any, connect: Callable[..., None]) -> None:
    connect("postgresql+psycopg://user:secret@127.0.0.1:1/delay")
    with pytest.raises(LedgerError) as failure:
        schedule(context, payload="x", deliver_after=60)

    assert "cannot be reached" in str(failure.value)
    assert "check that the database runs" in str(failure.value)
    assert "secret" not in str(failure.value)


def test_the_default_connection_works_without_being_defined(
    context: Any, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A21"""
    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", sqlite_url)
    message_id = schedule(context, payload="x", deliver_after=60)

    from airflow_delay_provider.brokers.ledger.database import Ledger

    with EmbeddedBroker(Ledger(sqlite_url)) as broker:
        assert record(broker, message_id).state is State.SCHEDULED


def deferred(context: Any, **options: Any) -> MessageDispatchedTrigger:
    with pytest.raises(TaskDeferred) as request:
        schedule(context, wait_for_dispatch=True, **options)
    assert request.value.method_name == "execute_complete"
    trigger = request.value.trigger
    assert isinstance(trigger, MessageDispatchedTrigger)
    return trigger


def test_waiting_defers_with_ids_and_nothing_of_the_content(broker: EmbeddedBroker, context: Any) -> None:
    """A2: no worker slot is used, and the stored arguments of the trigger hold no payload."""
    trigger = deferred(context, payload="very secret", headers={"h": "very secret"}, deliver_after=60)

    path, arguments = trigger.serialize()
    assert path == "airflow_delay_provider.triggers.message.MessageDispatchedTrigger"
    assert set(arguments) == {
        "message_ids",
        "delay_conn_id",
        "hold",
        "since",
        "cancel_on_kill",
        "ledger_id",
        "give_up_at",
    }
    assert "secret" not in repr(arguments)


async def test_a_message_dispatched_before_the_trigger_runs_is_not_missed(
    broker: EmbeddedBroker, context: Any, dispatch: Callable[..., int]
) -> None:
    trigger = deferred(context, payload="x", deliver_after=60)
    assert dispatch(timedelta(minutes=2)) == 1

    event = await anext(trigger.run())

    (message_id,) = trigger.message_ids
    assert event.payload["outcomes"][message_id]["change"] == "dispatched"
    operator = ScheduleMessageOperator(task_id="remind", channel="invoices", payload="x", deliver_after=60)
    assert operator.execute_complete(context, event.payload) == message_id


def test_messages_that_are_dispatched_already_need_no_waiting(
    broker: EmbeddedBroker, context: Any, dispatch: Callable[..., int]
) -> None:
    waiting = {"messages": [{"payload": "a"}, {"payload": "b", "deliver_after": 60}], "wait_for_dispatch": True}
    with pytest.raises(TaskDeferred):
        schedule(context, **waiting)
    dispatch(timedelta(minutes=2))

    ids = schedule(context, **waiting)

    assert [record(broker, message_id).state for message_id in ids] == [State.DISPATCHED] * 2


def test_a_cancelled_message_fails_the_waiting_task_for_good(broker: EmbeddedBroker, context: Any) -> None:
    trigger = deferred(context, messages=[{"payload": "a"}, {"payload": "b"}], deliver_after=60)
    broker.cancel(trigger.message_ids)

    with pytest.raises(AirflowFailException, match=r"2 of 2 messages were not dispatched \(.* cancelled, .*\)"):
        schedule(context, messages=[{"payload": "a"}, {"payload": "b"}], deliver_after=60, wait_for_dispatch=True)


def test_a_killed_task_cancels_its_messages_only_if_asked(broker: EmbeddedBroker, context: Any) -> None:
    for cancel, state in ((False, State.SCHEDULED), (True, State.CANCELLED)):
        operator = ScheduleMessageOperator(
            task_id="remind",
            channel="invoices",
            payload=None,
            message_id=f"cancel-{cancel}",
            deliver_after=60,
            cancel_on_kill=cancel,
        )
        message_id = operator.execute(context)
        operator.on_kill()
        assert record(broker, str(message_id)).state is state


def test_a_due_time_in_another_zone_is_the_same_moment(broker: EmbeddedBroker, context: Any) -> None:
    """B21"""
    there = TOMORROW.astimezone(timezone(timedelta(hours=-8)))
    stored: Message = record(broker, schedule(context, payload="x", deliver_at=there)).message
    assert stored.deliver_at.utcoffset() == timedelta(0)
    assert timedelta(0) <= stored.deliver_at - TOMORROW < timedelta(milliseconds=1)


def test_a_task_says_that_no_dispatcher_runs(
    broker: EmbeddedBroker, context: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """B41"""
    schedule(context, payload="x", message_id="sent at once")
    assert "no dispatcher" not in capsys.readouterr().out
    schedule(context, payload="x", message_id="waits", deliver_after=60)
    warning = "no dispatcher has ever been seen in this ledger; start one with `airflow delay dispatcher`"
    assert warning in capsys.readouterr().out
    write_heartbeat(broker.ledger)
    schedule(context, payload="x", message_id="is served", deliver_after=60)
    assert "no dispatcher" not in capsys.readouterr().out


def waiting_task(**options: Any) -> ScheduleMessageOperator:
    fields = {"task_id": "remind", "channel": "invoices", "payload": "x", "deliver_after": 1, "wait_for_dispatch": True}
    return ScheduleMessageOperator(**fields | options)


@pytest.mark.parametrize("wait_timeout", ["90", 90, timedelta(seconds=90)])
def test_a_task_waits_no_longer_than_it_may(broker: EmbeddedBroker, context: Any, wait_timeout: Any) -> None:
    task = waiting_task(wait_timeout=wait_timeout)
    began = datetime.now(UTC)
    with pytest.raises(TaskDeferred) as request:
        task.execute(context)

    trigger = request.value.trigger
    assert isinstance(trigger, MessageDispatchedTrigger)
    assert trigger.give_up_at is not None
    patience = datetime.fromisoformat(trigger.give_up_at) - began
    assert timedelta(seconds=90) <= patience < timedelta(seconds=150)
    assert request.value.timeout == timedelta(seconds=150)
    with pytest.raises(WaitTimeoutError) as failed:
        task.execute_complete(context, {"timed_out": True, "since": trigger.since})

    (message_id,) = trigger.message_ids
    assert f"1 of 1 messages were not dispatched within {wait_timeout}" in str(failed.value)
    assert "they stay scheduled, and a retry of this task waits for them again" in str(failed.value)
    assert "start one with `airflow delay dispatcher`" in str(failed.value)
    assert record(broker, message_id).state is State.SCHEDULED


def test_a_message_that_is_dispatched_at_the_last_moment_is_no_failure(
    broker: EmbeddedBroker, context: Any, dispatch: Callable[..., int]
) -> None:
    task = waiting_task(wait_timeout=90)
    with pytest.raises(TaskDeferred) as request:
        task.execute(context)
    dispatch(timedelta(minutes=1))
    trigger: Any = request.value.trigger
    assert task.execute_complete(context, {"timed_out": True, "since": trigger.since}) == trigger.message_ids[0]


def test_the_end_of_the_time_is_explained_also_when_airflow_noticed_it(broker: EmbeddedBroker, context: Any) -> None:
    timeout = {"error": TriggerFailureReason.TRIGGER_TIMEOUT}
    for wait_timeout, error in ((90, WaitTimeoutError), (None, TaskDeferralTimeout)):
        task = waiting_task(wait_timeout=wait_timeout)
        with pytest.raises(TaskDeferred):
            task.execute(context)
        with pytest.raises(error):
            task.resume_execution("__fail__", timeout, context)


@pytest.mark.parametrize(
    ("wait_timeout", "problem"), [("soon", "'soon' is not a delay"), (60, "use more than 1:00:00")]
)
def test_a_timeout_before_the_due_time_is_refused_before_anything_is_scheduled(
    broker: EmbeddedBroker, context: Any, wait_timeout: Any, problem: str
) -> None:
    task = waiting_task(wait_timeout=wait_timeout, deliver_after=3600, message_id="never")
    with pytest.raises(AirflowFailException, match=f"wait_timeout: .*{problem}"):
        task.execute(context)
    with pytest.raises(UnknownMessageError):
        record(broker, "never")


def test_the_wait_begins_at_a_position_before_the_messages_were_scheduled(broker: EmbeddedBroker, context: Any) -> None:
    """A message that is dispatched before its task waits is found, too."""
    before = broker.journal_end()
    with pytest.raises(TaskDeferred) as deferred:
        schedule(context, deliver_after=3600, wait_for_dispatch=True)
    trigger = deferred.value.trigger
    assert isinstance(trigger, MessageDispatchedTrigger)
    assert trigger.serialize()[1]["since"] == before
    assert broker.journal_end() != before
