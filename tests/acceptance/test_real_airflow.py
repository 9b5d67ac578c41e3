"""The provider in a real Airflow: api-server, scheduler, dag-processor, triggerer, and a dispatcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.records import MessageRecord
from airflow_delay_provider.domain.arguments import compose_message
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import Message, decode_payload
from tests.acceptance.runs import DEFERRED, SUCCESS, Run, Start
from tools.servers.airflow import Airflow
from tools.servers.airflow_api import AirflowApi

pytestmark = pytest.mark.timeout(600)

#: More messages than any channel here has.
MANY = 1000


@pytest.fixture
def records(broker: EmbeddedBroker) -> Callable[[str], list[MessageRecord]]:
    """Return all that the ledger knows of a channel's messages."""

    def look(channel: str) -> list[MessageRecord]:
        with broker.ledger.read() as connection:
            return list(listing.page(connection, channel=channel, size=MANY).records)

    return look


@pytest.fixture
def content(broker: EmbeddedBroker) -> Callable[[str], list[Message]]:
    """Return the messages in a channel."""
    return lambda channel: broker.peek(channel, limit=MANY)


@pytest.fixture
def record(broker: EmbeddedBroker) -> Callable[[str], MessageRecord]:
    """Return what the ledger knows of one message."""

    def look(message_id: str) -> MessageRecord:
        with broker.ledger.read() as connection:
            return listing.get(connection, message_id)

    return look


Records = Callable[[str], list[MessageRecord]]
Record = Callable[[str], MessageRecord]
Content = Callable[[str], list[Message]]


def test_every_dag_file_is_read_without_errors(api: AirflowApi) -> None:
    for dag_id in ("example_reminder", "waiting"):
        api.wait_for_dag(dag_id)
    assert api.import_errors() == []


@pytest.fixture(scope="module")
def waiting_reminder(api: AirflowApi) -> Run:
    """A run of the example in which one task is done and the other one waits for its message."""
    api.wait_for_dag("example_reminder")
    run = Run(api, "example_reminder", api.trigger("example_reminder", {"seconds": 3600}))
    run.wait_for_task("remind_later", SUCCESS)
    run.wait_for_task("remind_and_wait", DEFERRED)
    return run


@pytest.fixture(scope="module")
def slots(waiting_reminder: Run, airflow: Airflow, api: AirflowApi) -> dict[str, int]:
    """How the worker slots are used while it waits."""
    airflow.wait_for(lambda: api.pool()["occupied_slots"] == 0, what="no worker slot is taken", seconds=60)
    return api.pool()


@pytest.fixture(scope="module")
def reminder(waiting_reminder: Run, slots: dict[str, int], broker: EmbeddedBroker) -> Run:
    """The same run, whose messages are due after that look at the slots, one after the other."""
    with broker.ledger.read() as connection:
        waiting = listing.page(connection, channel="reminders").records
    due = broker.clock.now()
    for number, each in enumerate(sorted(waiting, key=lambda each: each.message.deliver_at)):
        broker.reschedule([each.message.id], due + number * timedelta(milliseconds=100))
    return waiting_reminder


def test_a_task_waits_for_its_message_without_a_worker_slot_and_is_resumed_by_the_dispatch(
    reminder: Run, slots: dict[str, int], record: Record
) -> None:
    """M1"""
    assert slots["deferred_slots"] >= 1
    reminder.wait()
    assert set(reminder.states().values()) == {"success"}
    dispatched = record(reminder.result("remind_and_wait"))
    assert dispatched.state is State.DISPATCHED
    assert dispatched.lateness is not None
    assert timedelta(0) <= dispatched.lateness < timedelta(seconds=30)


def test_each_message_of_a_dag_is_in_its_channel_once_with_its_headers(reminder: Run, content: Content) -> None:
    reminder.wait()
    ids = [*reminder.result("remind_later"), reminder.result("remind_and_wait")]
    arrived = [message for message in content("reminders") if message.headers == {"run": reminder.run_id}]
    assert [message.id for message in arrived] == ids
    assert [decode_payload(message.payload, message.content_type) for message in arrived] == [
        "Stand-up in the small room",
        "Lunch",
        {"invoice": 4711, "reminder": 1},
        "Go home",
    ]


def test_the_task_links_to_its_message(reminder: Run, airflow: Airflow) -> None:
    reminder.wait()
    message_id = reminder.result("remind_and_wait")
    links = reminder.api.links(reminder.dag_id, reminder.run_id, "remind_and_wait")
    assert links == {"Delayed message": f"{airflow.url}/plugin/delayed-messages/messages/{message_id}"}
    assert reminder.api.http.get(links["Delayed message"]).is_success
    found = reminder.api.http.get(f"{airflow.url}/delay/v1/messages/{message_id}")
    assert found.json()["origin"]["task_id"] == "remind_and_wait"


def test_the_command_line_shows_the_messages_of_a_dag(reminder: Run, airflow: Airflow) -> None:
    reminder.wait()
    status = json.loads(airflow.run("airflow", "delay", "status", "--channel", "reminders", "--output", "json"))
    assert status["counts"] == {"SCHEDULED": 0, "DISPATCHED": 4, "CANCELLED": 0, "DEAD": 0}
    listed = json.loads(airflow.run("airflow", "delay", "list", "--channel", "reminders", "--output", "json"))
    assert {message["origin"]["run_id"] for message in listed["messages"]} == {reminder.run_id}
    assert all(message["lateness_seconds"] >= 0 for message in listed["messages"])


def test_a_retried_and_a_cleared_task_schedule_nothing_twice(
    start: Start, airflow: Airflow, api: AirflowApi, records: Records, content: Content
) -> None:
    run = start("retried")
    run.wait()
    ids = {*run.result("by_operator"), run.result("by_hook")}
    assert run.task("by_operator")["try_number"] == run.task("by_hook")["try_number"] == 2

    before = {each.message.id: (each.scheduled_at, each.message.deliver_at) for each in records("retried")}
    assert set(before) == ids
    airflow.wait_for(lambda: len(content("retried")) >= 2, what="what was due is dispatched", seconds=60)
    assert sorted(message.payload for message in content("retried")) == [b"by hook", b"now"]

    api.clear("retried", run.run_id, "by_operator", "by_hook")
    run.wait_for_task("by_operator", frozenset({"queued", "running", "success"}))
    run.wait()
    assert run.task("by_operator")["try_number"] == run.task("by_hook")["try_number"] == 3
    assert {*run.result("by_operator"), run.result("by_hook")} == ids
    after = {each.message.id: (each.scheduled_at, each.message.deliver_at) for each in records("retried")}
    assert after == before
    assert sorted(message.payload for message in content("retried")) == [b"by hook", b"now"]


def test_sensors_and_control_operators_work_together_in_one_dag(
    start: Start, broker: EmbeddedBroker, record: Record, content: Content
) -> None:
    run = start("controlled")
    run.wait_for_task("dispatched", DEFERRED)
    run.wait_for_task("gate", DEFERRED)
    now = broker.clock.now()
    closed, opened = (compose_message("gate", {"open": each}, now=now) for each in (False, True))
    broker.send([closed, opened])
    run.wait()

    assert run.result("gate")["id"] == opened.id
    assert [message.id for message in content("gate")] == [closed.id]
    wanted, unwanted = record(run.result("wanted")), record(run.result("unwanted"))
    assert (wanted.state, unwanted.state) == (State.DISPATCHED, State.CANCELLED)
    assert [message.payload for message in content("controlled")] == [b"wanted"]


def test_mapped_tasks_and_a_decorated_function_schedule_a_message_each(
    start: Start, airflow: Airflow, record: Record, content: Content
) -> None:
    run = start("many")
    run.wait()
    ids = [run.result("mapped", map_index=index) for index in range(10)]
    assert len(set(ids)) == 10
    airflow.wait_for(
        lambda: len(content("mapped")) >= 10 and content("decorated"), what="all messages are dispatched", seconds=60
    )
    assert sorted(message.id for message in content("mapped")) == sorted(ids)
    for index, message_id in enumerate(ids):
        message = record(message_id).message
        assert message.origin is not None
        assert (message.origin.map_index, json.loads(message.payload)) == (index, {"number": index})

    [decorated] = content("decorated")
    assert decorated.id == run.result("decorated")
    assert json.loads(decorated.payload) == {"text": "{{ not a template }}"}
    assert decorated.headers == {"made": "by a function"}


def test_tasks_that_wait_for_seconds_only_are_resumed_and_not_failed(start: Start, content: Content) -> None:
    start("short_waits").wait()
    assert len(content("short_waits")) == 6


def test_bad_input_fails_the_task_at_once_and_says_what_to_do(start: Start, records: Records) -> None:
    run = start("bad_input")
    run.wait("failed")
    assert run.task("no_zone")["try_number"] == 1
    assert (
        "deliver_at: 2030-01-01T00:00:00 has no time zone; add one, for example +00:00 or datetime(..., tzinfo=UTC)"
        in run.log("no_zone")
    )
    assert records("bad") == []


def test_a_waiting_task_that_a_user_stops_cancels_its_message(
    start: Start, api: AirflowApi, airflow: Airflow, records: Records, content: Content
) -> None:
    run = start("killed")
    run.wait_for_task("wait", DEFERRED)
    airflow.wait_for(lambda: run.is_with_triggerer("wait"), what="the triggerer has taken over", seconds=60)
    [waiting] = records("killed")
    assert waiting.state is State.SCHEDULED
    api.mark("killed", run.run_id, "wait", "failed")
    airflow.wait_for(lambda: records("killed")[0].state is State.CANCELLED, what="the message is cancelled", seconds=60)
    run.wait("failed")
    assert content("killed") == []


def test_a_task_resumes_although_the_triggerer_was_killed_while_its_message_was_dispatched(
    start: Start, airflow: Airflow, broker: EmbeddedBroker, record: Record, records: Records
) -> None:
    run = start("waiting")
    run.wait_for_task("wait", DEFERRED)
    [waiting] = records("waiting")
    triggerer = airflow.components["triggerer"]
    triggerer.kill()
    broker.expedite([waiting.message.id])
    airflow.wait_for(
        lambda: record(waiting.message.id).state is State.DISPATCHED, what="the message is dispatched", seconds=60
    )
    assert run.task("wait")["state"] == "deferred"
    triggerer.start()
    run.wait()
    assert run.result("wait") == waiting.message.id


@pytest.mark.parametrize(
    ("dag_id", "logical_date"),
    [
        ("example_control", None),
        ("example_order", None),
        ("example_consume", None),
        # Its messages are due on the next morning, which has passed: they are delivered at once.
        ("example_delayed_message", "2025-06-01T00:00:00Z"),
    ],
)
def test_every_example_runs(start: Start, dag_id: str, logical_date: str | None) -> None:
    start(dag_id, logical_date=logical_date).wait()


def test_the_example_of_traffic_schedules_messages_for_the_next_month(start: Start, record: Record) -> None:
    run = start("example_traffic", {"connections": ["delay_default"]})
    run.wait()
    ids = run.result("schedule_orders", map_index=0)
    due = sorted(record(each).message.deliver_at - record(each).scheduled_at for each in ids)
    assert len(due) == len(set(ids)) > 100
    assert due[0] < timedelta(minutes=1) < timedelta(days=29) < due[-1]
