"""Who sees what, and who may change messages."""

from __future__ import annotations

import json
from html import escape
from typing import Any

import pytest
from playwright.sync_api import Page, Response, expect

from airflow_delay_provider.domain.lifecycle import State
from tests.browser.people import HOME, People
from tests.browser.scene import Scene
from tests.browser.web import serving

#: Sends a request from the page with the user's cookie, and returns the status and the body.
FETCH = """async ([method, url, body]) => {
    const options = {method, headers: {"X-Requested-With": "test", "Content-Type": "application/json"}};
    const answer = await fetch(url, body === null ? options : {...options, body: JSON.stringify(body)});
    return [answer.status, await answer.json()];
}"""
ACTIONS: dict[str, dict[str, Any]] = {"cancel": {}, "expedite": {}, "reschedule": {"deliver_after": 60}, "replay": {}}


def fetch(page: Page, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    status, answer = page.evaluate(FETCH, [method, f"/delay/v1{path}", body])
    return status, answer


def test_people_sign_in_with_the_form_and_come_back_to_the_page(people: People) -> None:
    page = people.open_signed_out("/messages?state=DEAD")
    expect(page.get_by_role("heading", name="Delayed messages")).to_be_hidden()
    people.sign_in(page, "editor")
    expect(page.get_by_role("heading", name="Delayed messages", level=1)).to_be_visible()
    expect(page.get_by_role("button", name="dead", exact=True)).to_have_attribute("aria-pressed", "true")


def test_the_menu_of_airflow_leads_to_the_page(people: People) -> None:
    page = people.open("viewer", "/messages")
    page.goto(people.url)
    page.get_by_role("link", name="Delayed messages").click()
    expect(page.get_by_role("heading", name="Delayed messages", level=1)).to_be_visible()


@pytest.mark.parametrize("path", ["", "/messages", "/retries", "/dead-letters", "/messages/any"])
def test_strangers_are_asked_to_sign_in(people: People, path: str) -> None:
    page = people.open_signed_out(path)
    expect(page.get_by_role("textbox", name="Password")).to_be_visible()
    assert fetch(page, "GET", "/messages")[0] == 401
    assert fetch(page, "POST", "/actions/cancel", {"ids": ["any"]})[0] == 401


def test_a_viewer_sees_no_action(people: People, scene: Scene) -> None:
    [message_id] = scene.schedule(1)
    [dead] = Scene(scene.ledger).kill(1, reason="cannot be parsed")
    page = people.open("viewer")
    for path, text in (
        (f"/messages?channel={scene.channel}", message_id),
        (f"/messages/{message_id}", message_id),
        ("/dead-letters", dead),
        (f"/messages/{dead}", dead),
    ):
        page.goto(f"{people.url}{HOME}{path}")
        expect(page.get_by_text(text).first).to_be_visible()
        for action in ("Cancel", "Reschedule", "Expedite", "Replay"):
            expect(page.get_by_role("button", name=action, exact=True)).to_have_count(0)
        expect(page.get_by_role("checkbox")).to_have_count(0)


@pytest.mark.parametrize("action", ACTIONS)
def test_a_viewer_is_refused_each_action(people: People, scene: Scene, action: str) -> None:
    """M5"""
    [message_id] = scene.kill(1, reason="test") if action == "replay" else scene.schedule(1)
    before = scene.record_of(message_id)
    page = people.open("viewer", "/messages")
    status, problem = fetch(page, "POST", f"/actions/{action}", {"ids": [message_id], **ACTIONS[action]})
    assert (status, problem["status"]) == (403, 403)
    by_filter = {"filter": {"channel": scene.channel}, **ACTIONS[action]}
    assert fetch(page, "POST", f"/actions/{action}", by_filter)[1].get("changed", 0) == 0
    assert scene.record_of(message_id) == before


def test_a_viewer_may_not_schedule(people: People) -> None:
    page = people.open("viewer", "/messages")
    body = {"channel": "test-refused", "payload": "x", "deliver_after": 60}
    assert fetch(page, "POST", "/messages", body)[0] == 403


def test_posts_of_another_site_are_refused(people: People, scene: Scene) -> None:
    [message_id] = scene.schedule(1)
    target = f"{people.url}/delay/v1/actions/cancel"
    # As text/plain, a form can send JSON without asking for permission first.
    name = json.dumps({"ids": [message_id], "conn_id": None})[:-1] + ', "page": "'
    attack = f"""<form action="{target}" method="post" enctype="text/plain">
        <input name="{escape(name)}" value='"}}'><button>Win a prize</button></form>"""
    with serving(attack) as elsewhere:
        page = people.open("editor", "/messages")
        page.goto(elsewhere)
        with page.expect_response(target) as answer:
            page.get_by_role("button", name="Win a prize").click()
        assert "_token=" in answer.value.request.all_headers()["cookie"]
        assert answer.value.status == 403
        page.goto(elsewhere)
        for headers in ({}, {"X-Requested-With": "attack", "Content-Type": "application/json"}):
            outcome = page.evaluate(
                """([url, body, headers]) => fetch(url, {
                    method: "POST", credentials: "include", headers, body,
                    mode: Object.keys(headers).length ? "cors" : "no-cors",
                }).then(answer => answer.type, () => "refused")""",
                [target, json.dumps({"ids": [message_id]}), headers],
            )
            assert outcome in ("opaque", "refused")
    assert scene.state_of(message_id) is State.SCHEDULED


def test_the_files_of_the_pages_come_from_airflow_only(people: People) -> None:
    page = people.open("viewer", "/messages")
    answers: list[Response] = []
    page.on("response", lambda answer: answers.append(answer))
    page.goto(f"{people.url}{HOME}")
    page.get_by_role("region", name="Dispatchers").wait_for()
    ours = [answer for answer in answers if "/delay/" in answer.url]
    assert {answer.status for answer in ours} == {200}
    assert {answer.url for answer in ours if not answer.url.startswith(people.url)} == set()
