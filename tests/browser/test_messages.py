"""The list of messages and the page of one message, as an editor uses them."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from playwright.sync_api import Locator, Page, expect

from airflow_delay_provider.domain.lifecycle import State
from tests.acceptance.runs import Start
from tests.browser.people import People
from tests.browser.scene import Scene

#: Rows of one page.
PAGE = 50


def ids_shown(page: Page, channel: str) -> list[str]:
    """The ids in the order of the rows."""
    return links_to(page, channel).all_inner_texts()


def links_to(page: Page, channel: str) -> Locator:
    return page.get_by_role("table").get_by_role("link", name=re.compile(f"^{channel}-"))


def ask_for(page: Page, action: str) -> Locator:
    """Press the button of an action and return the dialog that asks for confirmation."""
    page.get_by_role("button", name=action, exact=True).click()
    return page.get_by_role("alertdialog", name=action)


def confirm(dialog: Locator, button: str) -> None:
    dialog.get_by_role("button", name=button, exact=True).click()
    expect(dialog).to_be_hidden()


def test_a_message_that_a_dag_schedules_appears_without_reload(people: People, start: Start) -> None:
    page = people.open("editor", "/messages?dag_id=waiting&state=SCHEDULED")
    page.evaluate("window.isSamePage = true")
    run = start("waiting")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=run.run_id))
    expect(row).to_contain_text("scheduled", timeout=120_000)
    expect(row).to_contain_text(re.compile(r"in (59|60) min|in 1 h"))
    assert page.evaluate("window.isSamePage") is True


def test_filters_are_in_the_address_which_shows_others_the_same_rows(people: People, scene: Scene) -> None:
    ids = scene.schedule(5)
    scene.ledger.cancel(ids[:2])
    page = people.open("editor", "/messages")
    page.get_by_label("Channel").fill(scene.channel)
    page.get_by_role("button", name="scheduled", exact=True).click()
    expect(links_to(page, scene.channel)).to_have_text(ids[2:])
    page.get_by_label("Text in the id").fill("0003")
    expect(links_to(page, scene.channel)).to_have_text([ids[3]])
    page.get_by_label("Text in the id").fill("")
    expect(links_to(page, scene.channel)).to_have_text(ids[2:])

    colleague = people.open("viewer", page.url.partition("delayed-messages")[2])
    expect(links_to(colleague, scene.channel)).to_have_text(ids[2:])
    expect(colleague.get_by_label("Channel")).to_have_value(scene.channel)
    colleague.get_by_role("button", name="Clear filters").click()
    expect(colleague).not_to_have_url(re.compile("channel="))


def test_pages_go_forth_and_back(people: People, scene: Scene) -> None:
    ids = scene.schedule(PAGE + 7)
    page = people.open("viewer", f"/messages?channel={scene.channel}")
    expect(links_to(page, scene.channel)).to_have_text(ids[:PAGE])
    expect(page.get_by_role("button", name="Previous")).to_be_disabled()
    page.get_by_role("button", name="Next").click()
    expect(links_to(page, scene.channel)).to_have_text(ids[PAGE:])
    second = page.url
    page.get_by_role("button", name="Previous").click()
    expect(links_to(page, scene.channel)).to_have_text(ids[:PAGE])
    page.go_back()
    expect(page).to_have_url(second)
    expect(links_to(page, scene.channel)).to_have_text(ids[PAGE:])


def test_a_message_shows_its_content_and_its_history(people: People, scene: Scene) -> None:
    [message_id] = scene.schedule(1, payload={"order": 42}, headers={"trace": "abc"})
    page = people.open("viewer", f"/messages?channel={scene.channel}")
    page.get_by_role("link", name=message_id).click()
    expect(page.get_by_role("heading", name=message_id)).to_be_visible()
    expect(page.get_by_role("region", name="Payload")).to_contain_text('"order": 42')
    expect(page.get_by_role("region", name="Headers")).to_contain_text("abc")
    expect(page.get_by_role("region", name="History").get_by_role("listitem")).to_have_count(1)
    scene.ledger.cancel([message_id])
    expect(page.get_by_role("region", name="History").get_by_role("listitem")).to_have_count(2)


def test_one_message_is_cancelled(people: People, scene: Scene) -> None:
    """M5"""
    [message_id] = scene.schedule(1)
    page = people.open("editor", f"/messages/{message_id}")
    dialog = ask_for(page, "Cancel")
    expect(dialog).to_contain_text("1 message")
    dialog.get_by_role("button", name="Back").click()
    expect(dialog).to_be_hidden()
    assert scene.state_of(message_id) is State.SCHEDULED

    confirm(ask_for(page, "Cancel"), "Cancel 1 message")
    expect(page.get_by_role("region", name="History")).to_contain_text("cancelled")
    expect(page.get_by_role("button", name="Cancel", exact=True)).to_be_hidden()
    assert scene.state_of(message_id) is State.CANCELLED


def test_one_message_is_rescheduled(people: People, scene: Scene) -> None:
    [message_id] = scene.schedule(1)
    due = scene.record_of(message_id).message.deliver_at
    page = people.open("editor", f"/messages/{message_id}")
    dialog = ask_for(page, "Reschedule")
    dialog.get_by_label("Delay", exact=True).fill("3")
    dialog.get_by_label("Unit").select_option("hours")
    confirm(dialog, "Reschedule 1 message")
    expect(page.get_by_role("region", name="History")).to_contain_text("rescheduled")
    expect(page.get_by_role("region", name="Details")).to_contain_text(re.compile(r"in (2 h|3 h)"))
    later = scene.record_of(message_id).message.deliver_at - due
    assert timedelta(hours=1, minutes=55) < later < timedelta(hours=2, minutes=5)


def test_one_message_is_expedited(people: People, scene: Scene) -> None:
    [message_id] = scene.schedule(1)
    page = people.open("editor", f"/messages/{message_id}")
    confirm(ask_for(page, "Expedite"), "Expedite 1 message")
    expect(page.get_by_role("region", name="Details")).to_contain_text("Dispatched")
    assert scene.state_of(message_id) is State.DISPATCHED


def test_bulk_cancel_says_how_many_before_it_cancels_them(people: People, scene: Scene) -> None:
    ids = scene.schedule(PAGE + 10)
    others = Scene(scene.ledger)
    [other] = others.schedule(1)
    page = people.open("editor", f"/messages?channel={scene.channel}&state=SCHEDULED")
    for message_id in ids[:3]:
        page.get_by_label(f"Select {message_id}").check(force=True)
    dialog = ask_for(page, "Cancel")
    expect(dialog).to_contain_text("3 messages")
    confirm(dialog, "Cancel 3 messages")
    expect(links_to(page, scene.channel).first).to_have_text(ids[3])
    assert [scene.state_of(each) for each in ids[:4]] == [State.CANCELLED] * 3 + [State.SCHEDULED]

    page.get_by_role("button", name=re.compile("all that match this filter")).click()
    dialog = ask_for(page, "Cancel")
    expect(dialog).to_contain_text(f"{len(ids) - 3} messages")
    confirm(dialog, f"Cancel {len(ids) - 3} messages")
    expect(page.get_by_text("No message matches these filters")).to_be_visible()
    assert {scene.state_of(each) for each in ids} == {State.CANCELLED}
    assert others.state_of(other) is State.SCHEDULED


def test_a_list_in_use_does_not_jump(people: People, scene: Scene) -> None:
    ids = scene.schedule(3)
    page = people.open("editor", f"/messages?channel={scene.channel}")
    expect(links_to(page, scene.channel)).to_have_text(ids)
    page.get_by_label(f"Select {ids[1]}").check(force=True)
    sooner = scene.schedule(1, deliver_after=timedelta(minutes=5), first=9)
    page.get_by_role("button", name="Show 1 change").wait_for()
    assert ids_shown(page, scene.channel) == ids
    page.get_by_role("button", name="Show 1 change").click()
    expect(links_to(page, scene.channel)).to_have_text(sooner + ids)
    expect(page.get_by_label(f"Select {ids[1]}")).to_be_checked()


@pytest.mark.parametrize("action", ["Cancel", "Reschedule", "Expedite"])
def test_the_second_of_two_people_gets_a_clear_answer(people: People, scene: Scene, action: str) -> None:
    [message_id] = scene.schedule(1)
    first, second = (people.open(user, f"/messages/{message_id}") for user in ("admin", "editor"))
    late = ask_for(second, action)
    expect(late.get_by_role("button", name=f"{action} 1 message")).to_be_enabled()
    confirm(ask_for(first, "Cancel"), "Cancel 1 message")

    late.get_by_role("button", name=f"{action} 1 message").click()
    expect(late.get_by_role("alert")).to_contain_text(re.compile("cancelled", re.IGNORECASE))
    late.get_by_role("button", name=re.compile("Back|Close")).click()
    expect(second.get_by_role("button", name=action, exact=True)).to_be_hidden()
    expect(second.get_by_role("region", name="History")).to_contain_text("cancelled")


def test_an_unknown_message_is_said_to_be_unknown(people: People) -> None:
    page = people.open("viewer", "/messages/nobody%2Fknows it")
    expect(page.get_by_role("alert")).to_contain_text("Not found")
