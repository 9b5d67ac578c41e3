from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient
from httpx import Response

from airflow_delay_provider.api import actions
from airflow_delay_provider.brokers.ledger import search
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import Message, Origin
from airflow_delay_provider.testing.clock import START
from airflow_delay_provider.testing.kit import DelayTestKit
from tests.selective_auth import CLOSED_DAG, OPEN_DAG
from tests.unit.api.conftest import Become

HOUR = timedelta(hours=1)
Act = Callable[..., Any]
WAITING_ACTIONS = ("cancel", "expedite", "reschedule")


def schedule(kit: DelayTestKit, *ids: str, dag_id: str | None = None, after: timedelta = HOUR) -> None:
    """Schedule messages, each a second after the other."""
    origin = None if dag_id is None else Origin(dag_id=dag_id, run_id="r", task_id="t")
    for n, message_id in enumerate(ids):
        due_after = after + timedelta(seconds=n)
        kit.schedule("invoices", deliver_after=due_after, message_id=message_id, origin=origin)


def give_up(kit: DelayTestKit, *ids: str, channel: str = "invoices") -> None:
    """Make dead letters."""

    def refuse(_message: object) -> None:
        raise ValueError("no such customer")

    for message_id in ids:
        kit.schedule(channel, message_id=message_id)
    kit.consume(channel, refuse)


def post(client: TestClient, action: str, **body: Any) -> Response:
    given = {"deliver_after": 60} if action == "reschedule" and not {"deliver_at", "deliver_after"} & set(body) else {}
    answer: Response = client.post(f"/v1/actions/{action}", json=given | body)
    return answer


def states(kit: DelayTestKit, *ids: str) -> list[str]:
    return [kit.record(each).state.name for each in ids]


def due(kit: DelayTestKit, *ids: str) -> list[timedelta]:
    return [kit.record(each).message.deliver_at - START for each in ids]


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actions by filter change two messages at once."""
    monkeypatch.setattr(actions, "MAX_PER_ACTION", 2)


# -- one message -----------------------------------------------------------------------------------------------------


def test_one_message_is_cancelled_rescheduled_and_expedited(act: Act, delay_kit: DelayTestKit) -> None:
    """B56, B59"""
    schedule(delay_kit, "a", "b", "c")
    assert act("cancel", ids=["a"]) == {
        "action": "cancel",
        "dry_run": False,
        "matched": 1,
        "is_exact": True,
        "changed": 1,
        "refused": [],
        "next": None,
        "deliver_at": None,
    }
    assert act("reschedule", ids=["b"], deliver_after=120)["deliver_at"] == "2030-01-01T00:02:00Z"
    assert act("expedite", ids=["c"])["changed"] == 1
    assert states(delay_kit, "a", "b", "c") == ["CANCELLED", "SCHEDULED", "SCHEDULED"]
    assert due(delay_kit, "b", "c") == [timedelta(minutes=2), timedelta(0)]
    assert delay_kit.dispatch() == 1


@pytest.mark.parametrize("action", ["cancel", "expedite", "reschedule", "replay"])
def test_an_unknown_message_is_not_found(client: TestClient, action: str) -> None:
    answer = post(client, action, ids=["no such"])
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    assert answer.json()["detail"] == "The ledger has no message 'no such'."


@pytest.mark.parametrize("action", WAITING_ACTIONS)
def test_a_dispatched_message_cannot_be_changed(client: TestClient, delay_kit: DelayTestKit, action: str) -> None:
    delay_kit.schedule("invoices", message_id="sent")
    answer = post(client, action, ids=["sent"])
    assert answer.status_code == 409
    assert answer.json()["detail"].startswith(
        "Message 'sent' is DISPATCHED since 2030-01-01 00:00:00 UTC and cannot be"
    )
    assert answer.json()["detail"].endswith("ed; only a scheduled message can.")


def test_the_second_of_two_people_who_cancel_gets_a_clear_answer(client: TestClient, delay_kit: DelayTestKit) -> None:
    schedule(delay_kit, "a")
    assert post(client, "cancel", ids=["a"]).status_code == 200
    answer = post(client, "cancel", ids=["a"])
    assert (answer.status_code, answer.json()["detail"]) == (
        409,
        "Message 'a' is CANCELLED since 2030-01-01 00:00:00 UTC and cannot be cancelled; only a scheduled message can.",
    )


def test_the_second_of_two_people_who_reschedule_gets_a_clear_answer(
    client: TestClient, delay_kit: DelayTestKit
) -> None:
    schedule(delay_kit, "a")
    seen = client.get("/v1/messages/a").json()["generation"]
    assert post(client, "reschedule", ids=["a"], deliver_after=60, generation=seen).status_code == 200
    answer = post(client, "reschedule", ids=["a"], deliver_after=90, generation=seen)
    assert (answer.status_code, answer.json()["detail"]) == (
        409,
        "Message 'a' has been changed since you read it; read it again.",
    )
    assert due(delay_kit, "a") == [timedelta(minutes=1)]


def test_a_change_between_reading_and_writing_is_a_conflict(
    client: TestClient, delay_kit: DelayTestKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule(delay_kit, "a", "b")
    choose = actions._Action._choose_by_id

    def choose_and_let_another_cancel(action: Any, ids: Any) -> Any:
        chosen = choose(action, ids)
        delay_kit.broker.cancel(["a"])
        return chosen

    monkeypatch.setattr(actions._Action, "_choose_by_id", choose_and_let_another_cancel)
    answer = post(client, "expedite", ids=["a", "b"])
    assert (answer.status_code, answer.json()["changed"]) == (200, 1)
    [refusal] = answer.json()["refused"]
    assert (refusal["id"], refusal["status"]) == ("a", 409)
    assert "CANCELLED" in refusal["detail"]


@pytest.mark.parametrize(
    ("dag_id", "words"),
    [(None, "You may not edit this message."), (OPEN_DAG, "You may not edit task instances of its DAG.")],
)
@pytest.mark.parametrize("action", WAITING_ACTIONS)
def test_viewers_change_nothing(
    client: TestClient, become: Become, delay_kit: DelayTestKit, action: str, dag_id: str | None, words: str
) -> None:
    schedule(delay_kit, "a", dag_id=dag_id)
    become("viewer")
    answer = post(client, action, ids=["a"])
    assert (answer.status_code, answer.json()["detail"]) == (403, words)
    assert post(client, action, filter={}).json()["matched"] == 0
    assert (states(delay_kit, "a"), due(delay_kit, "a")) == (["SCHEDULED"], [HOUR])


def test_editors_change_messages_of_their_dags_only(
    client: TestClient, become: Become, delay_kit: DelayTestKit
) -> None:
    schedule(delay_kit, "mine", dag_id=OPEN_DAG)
    schedule(delay_kit, "theirs", dag_id=CLOSED_DAG)
    schedule(delay_kit, "of no task")
    become("user")
    found = post(client, "cancel", ids=["mine", "theirs", "of no task", "unknown"]).json()
    assert (found["matched"], found["changed"]) == (1, 1)
    assert [(each["id"], each["status"]) for each in found["refused"]] == [
        ("theirs", 403),
        ("of no task", 403),
        ("unknown", 404),
    ]
    assert states(delay_kit, "mine", "theirs", "of no task") == ["CANCELLED", "SCHEDULED", "SCHEDULED"]


@pytest.mark.parametrize("action", ["cancel", "expedite", "reschedule", "replay"])
def test_a_request_without_the_custom_header_changes_nothing(
    client: TestClient, delay_kit: DelayTestKit, action: str
) -> None:
    schedule(delay_kit, "a")
    del client.headers["X-Requested-With"]
    answer = post(client, action, ids=["a"])
    assert answer.status_code == 403
    assert "X-Requested-With is missing" in answer.json()["detail"]
    assert states(delay_kit, "a") == ["SCHEDULED"]


# -- bad requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "ids"),
        ({"ids": []}, "ids"),
        ({"ids": ["a"], "filter": {}}, "ids"),
        ({"ids": ["x"] * 1001}, "ids"),
        ({"ids": ["a\0b"]}, "ids.0"),
        ({"ids": ["a\nb"]}, "message_id"),
        ({"ids": ["x" * 256]}, "ids.0"),
        ({"ids": ["a"], "all": True}, "all"),
        ({"filter": {"state": "SCHEDULED"}}, "filter.state"),
        ({"filter": {"due_from": "2030-01-01T00:00:00"}}, "filter.due_from"),
        ({"filter": {"due_from": 1893456000}}, "filter.due_from"),
        ({"filter": {}, "page": "rubbish"}, "page"),
        ({"ids": ["a"], "dry_run": "perhaps"}, "dry_run"),
    ],
)
def test_a_bad_selection_names_the_field(client: TestClient, body: dict[str, Any], field: str) -> None:
    answer = client.post("/v1/actions/cancel", json=body)
    assert (answer.status_code, answer.json()["field"]) == (400, field), answer.text


def test_names_of_fields_that_utf8_cannot_encode_are_refused(client: TestClient) -> None:
    answer = client.post("/v1/actions/cancel", content=b'{"\\ud800": 1}', headers={"Content-Type": "application/json"})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("times", "status", "field"),
    [
        ({}, 400, "deliver_at"),
        ({"deliver_at": "2030-01-02T00:00:00Z", "deliver_after": 5}, 400, "deliver_at"),
        ({"deliver_at": "2030-01-02T00:00:00"}, 400, "deliver_at"),
        ({"deliver_at": "tomorrow"}, 400, "deliver_at"),
        ({"deliver_at": "0001-01-01T00:00:00+23:00"}, 400, "deliver_at"),
        ({"deliver_at": "9999-12-31T23:59:59.999999-23:00"}, 400, "deliver_at"),
        ({"deliver_at": "9999-12-31T23:59:59.999999Z"}, 400, "deliver_at"),
        ({"deliver_at": "2045-01-01T00:00:00Z"}, 400, "deliver_at"),
        ({"deliver_after": 1e300}, 400, "deliver_after"),
        ({"deliver_after": 1e11}, 400, "deliver_at"),
        ({"deliver_after": 60, "page": "Pjox"}, 400, "deliver_after"),
        ({"deliver_at": "2029-01-01T00:00:00Z", "on_past": "fail"}, 412, "deliver_at"),
        ({"deliver_after": 60, "generation": 2**70}, 400, "generation"),
    ],
)
def test_a_bad_delivery_time_names_the_field(
    client: TestClient, delay_kit: DelayTestKit, times: dict[str, Any], status: int, field: str
) -> None:
    schedule(delay_kit, "a")
    answer = client.post("/v1/actions/reschedule", json={"ids": ["a"]} | times)
    assert (answer.status_code, answer.json()["field"]) == (status, field), answer.text
    assert due(delay_kit, "a") == [HOUR]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_delays_that_are_no_numbers_are_refused(client: TestClient, number: str) -> None:
    body = f'{{"ids": ["a"], "deliver_after": {number}}}'
    answer = client.post("/v1/actions/reschedule", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["field"]) == (400, "deliver_after")


def test_a_past_time_makes_a_message_due(act: Act, delay_kit: DelayTestKit) -> None:
    schedule(delay_kit, "a")
    act("reschedule", ids=["a"], deliver_at="2029-12-31T23:00:00+00:00")
    assert delay_kit.dispatch() == 1


def test_generation_is_for_one_message(client: TestClient, delay_kit: DelayTestKit) -> None:
    schedule(delay_kit, "a", "b")
    for selection in ({"ids": ["a", "b"]}, {"filter": {}}):
        answer = post(client, "reschedule", **selection, generation=0)
        assert (answer.status_code, answer.json()["field"]) == (400, "generation")


# -- many messages ---------------------------------------------------------------------------------------------------


def test_many_messages_are_changed_but_those_that_are_refused(act: Act, delay_kit: DelayTestKit) -> None:
    """B59"""
    schedule(delay_kit, "a", "b")
    delay_kit.schedule("invoices", message_id="sent")
    found = act("cancel", ids=["a", "unknown", "sent", "b", "a"])
    assert (found["matched"], found["changed"], found["is_exact"]) == (2, 2, True)
    assert [(each["id"], each["status"]) for each in found["refused"]] == [("unknown", 404), ("sent", 409)]
    assert states(delay_kit, "a", "b") == ["CANCELLED", "CANCELLED"]
    again = act("cancel", ids=["a", "b"])
    assert (again["changed"], [each["status"] for each in again["refused"]]) == (0, [409, 409])


def test_a_dry_run_counts_and_changes_nothing(act: Act, client: TestClient, delay_kit: DelayTestKit) -> None:
    schedule(delay_kit, "a", "b", "c")
    for selection in ({"ids": ["a", "b", "c"]}, {"filter": {"channel": "invoices"}}):
        found = act("cancel", **selection, dry_run=True)
        assert (found["dry_run"], found["matched"], found["is_exact"], found["changed"], found["next"]) == (
            True,
            3,
            True,
            0,
            None,
        )
    assert post(client, "cancel", ids=["unknown"], dry_run=True).status_code == 404
    assert states(delay_kit, "a", "b", "c") == ["SCHEDULED"] * 3


@pytest.mark.usefixtures("small_pages")
def test_a_dry_run_says_if_there_are_more(act: Act, delay_kit: DelayTestKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "PAGES_COUNTED", 2)
    schedule(delay_kit, *"abcd")
    assert [act("cancel", filter={}, dry_run=True)[name] for name in ("matched", "is_exact")] == [4, True]
    schedule(delay_kit, "e")
    assert [act("cancel", filter={}, dry_run=True)[name] for name in ("matched", "is_exact")] == [4, False]


def test_a_dry_run_continues_a_search_that_finds_nothing_at_first(
    act: Act, delay_kit: DelayTestKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SCANNED_IN_BULK", 3)
    schedule(delay_kit, *(f"m{n}" for n in range(10)), "wanted")
    assert [act("cancel", filter={"search": "want"}, dry_run=True)[name] for name in ("matched", "is_exact")] == [
        1,
        True,
    ]


def test_a_filter_that_selects_nothing_changes_nothing(act: Act, delay_kit: DelayTestKit) -> None:
    schedule(delay_kit, "a")
    found = act("cancel", filter={"channel": "orders"})
    assert (found["matched"], found["changed"], found["refused"], found["next"]) == (0, 0, [], None)


def test_a_filter_answers_with_refusals_even_for_one_message(
    act: Act, delay_kit: DelayTestKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule(delay_kit, "a")
    choose = actions._Action._choose_by_filter

    def choose_and_let_another_cancel(action: Any, given: Any) -> Any:
        chosen = choose(action, given)
        delay_kit.broker.cancel(["a"])
        return chosen

    monkeypatch.setattr(actions._Action, "_choose_by_filter", choose_and_let_another_cancel)
    found = act("expedite", filter={})
    assert (found["matched"], found["changed"]) == (1, 0)
    assert [(each["id"], each["status"]) for each in found["refused"]] == [("a", 409)]


def all_pages(act: Act, action: str, **body: Any) -> list[int]:
    """Act page by page and return how many messages each page has changed."""
    changed, page = list[int](), None
    for _ in range(20):
        found = act(action, **body, **({} if page is None else {"page": page}))
        changed.append(found["changed"])
        page = found["next"]
        if page is None:
            return changed
        if found["deliver_at"] is not None:
            body = {name: value for name, value in body.items() if name != "deliver_after"}
            body["deliver_at"] = found["deliver_at"]
    raise AssertionError(f"there is always a next page: {changed}")


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("action", WAITING_ACTIONS)
def test_a_filter_changes_every_message_once_page_by_page(act: Act, delay_kit: DelayTestKit, action: str) -> None:
    schedule(delay_kit, *"abcde")
    later = {"deliver_after": 7200.0005} if action == "reschedule" else {}
    assert sum(all_pages(act, action, filter={}, **later)) == 5
    assert [delay_kit.record(each).generation for each in "abcde"] == [1] * 5


@pytest.mark.usefixtures("small_pages")
def test_a_filter_expedites_no_message_that_is_due_already(act: Act, delay_kit: DelayTestKit) -> None:
    schedule(delay_kit, *"abcde", after=timedelta(seconds=1))
    delay_kit.clock.advance(timedelta(seconds=3))
    assert sum(all_pages(act, "expedite", filter={})) == 2
    assert due(delay_kit, *"abcde") == [timedelta(seconds=n) for n in (1, 2, 3, 3, 3)]


@pytest.mark.usefixtures("small_pages")
def test_pages_go_on_behind_messages_that_are_refused(act: Act, become: Become, delay_kit: DelayTestKit) -> None:
    for n, dag_id in enumerate([CLOSED_DAG, OPEN_DAG, CLOSED_DAG, OPEN_DAG, OPEN_DAG]):
        schedule(delay_kit, str(n), dag_id=dag_id, after=HOUR + timedelta(seconds=n))
    become("user")
    assert sum(all_pages(act, "cancel", filter={})) == 3
    assert states(delay_kit, *"01234") == ["SCHEDULED", "CANCELLED", "SCHEDULED", "CANCELLED", "CANCELLED"]


def test_one_call_changes_at_most_1000_messages(act: Act, delay_kit: DelayTestKit) -> None:
    due_at = START + HOUR
    delay_kit.broker.schedule([Message(channel="invoices", payload=b"", deliver_at=due_at) for _ in range(1001)])
    assert [act("cancel", filter={}, dry_run=True)[name] for name in ("matched", "is_exact")] == [1001, True]
    assert all_pages(act, "cancel", filter={}) == [1000, 1]


# -- dead letters ----------------------------------------------------------------------------------------------------


def test_one_dead_letter_is_replayed(act: Act, client: TestClient, delay_kit: DelayTestKit) -> None:
    give_up(delay_kit, "dead")
    assert states(delay_kit, "dead") == [State.DEAD.name]
    assert act("replay", ids=["dead"])["changed"] == 1
    assert states(delay_kit, "dead") == ["SCHEDULED"]
    answer = post(client, "replay", ids=["dead"])
    assert answer.status_code == 409
    assert answer.json()["detail"].endswith("cannot be replayed; only a dead message can.")
    delay_kit.dispatch()
    assert [each.id for each in delay_kit.received("invoices")] == ["dead"]


@pytest.mark.usefixtures("small_pages")
def test_dead_letters_of_several_channels_are_replayed_page_by_page(act: Act, delay_kit: DelayTestKit) -> None:
    give_up(delay_kit, "a", "b", "c")
    give_up(delay_kit, "d", "e", channel="orders")
    assert sum(all_pages(act, "replay", filter={"channel": "orders"})) == 2
    assert sum(all_pages(act, "replay", filter={})) == 3
    assert states(delay_kit, *"abcde") == ["SCHEDULED"] * 5


def test_of_many_dead_letters_those_that_are_not_dead_are_refused(act: Act, delay_kit: DelayTestKit) -> None:
    give_up(delay_kit, "a", "b")
    schedule(delay_kit, "waits")
    found = act("replay", ids=["a", "waits", "b"])
    assert (found["changed"], [(each["id"], each["status"]) for each in found["refused"]]) == (2, [("waits", 409)])


def test_dead_letters_that_somebody_else_replays_meanwhile_are_refused(
    client: TestClient, act: Act, delay_kit: DelayTestKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up(delay_kit, "a", "b", "c")
    choose = actions._Action._choose_by_id

    def choose_and_let_another_replay(action: Any, ids: Any) -> Any:
        chosen = choose(action, ids)
        act_of_another("a")
        return chosen

    def act_of_another(message_id: str) -> None:
        with monkeypatch.context() as before:
            before.setattr(actions._Action, "_choose_by_id", choose)
            client.post("/v1/actions/replay", json={"ids": [message_id]})

    monkeypatch.setattr(actions._Action, "_choose_by_id", choose_and_let_another_replay)
    found = act("replay", ids=["a", "b"])
    assert (found["changed"], [(each["id"], each["status"]) for each in found["refused"]]) == (1, [("a", 409)])
    assert found["refused"][0]["detail"] == "message 'a' is not dead any more"
