"""The page of dead letters."""

from __future__ import annotations

from playwright.sync_api import expect

from airflow_delay_provider.domain.lifecycle import State
from tests.browser.people import People
from tests.browser.scene import VISIBILITY, Scene
from tools.servers.component import wait_for


def test_a_dead_letter_is_replayed(people: People, scene: Scene) -> None:
    [message_id] = scene.kill(1, reason="the order is not known")
    page = people.open("editor", f"/dead-letters?channel={scene.channel}")
    row = page.get_by_role("row").filter(has_text=message_id)
    expect(row).to_contain_text("the order is not known")
    row.get_by_role("link", name=message_id).click()
    page.get_by_role("button", name="Replay", exact=True).click()
    dialog = page.get_by_role("alertdialog", name="Replay")
    dialog.get_by_role("button", name="Replay 1 dead letter").click()
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="Replay", exact=True)).to_be_hidden()
    [delivery] = wait_for(
        lambda: scene.ledger.receive(scene.channel, visibility=VISIBILITY), what="the replayed message", seconds=30
    )
    assert delivery.message.id == message_id


def test_selected_dead_letters_are_replayed_together(people: People, scene: Scene) -> None:
    ids = scene.kill(3, reason="out of stock")
    page = people.open("editor", f"/dead-letters?channel={scene.channel}")
    for message_id in ids[:2]:
        page.get_by_label(f"Select {message_id}").check(force=True)
    page.get_by_role("button", name="Replay", exact=True).click()
    dialog = page.get_by_role("alertdialog", name="Replay")
    expect(dialog).to_contain_text("2 dead letters")
    dialog.get_by_role("button", name="Replay 2 dead letters").click()
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("row").filter(has_text=scene.channel)).to_have_count(1)
    assert scene.state_of(ids[2]) is State.DEAD
    assert State.DEAD not in {scene.state_of(each) for each in ids[:2]}
