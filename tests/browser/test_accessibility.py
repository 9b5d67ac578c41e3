"""The pages for everybody: axe, dark mode, narrow screens, the keyboard."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from tests.browser.people import People
from tests.browser.scene import Scene

SERIOUS = ("serious", "critical")
#: Path to text that is there once the page is complete; ``{}`` is the channel of the messages.
PAGES = {
    "": "Dispatchers",
    "/messages?channel={}": "{}-0000",
    "/messages/{}-0000": "History",
    "/retries": "Waiting Spark jobs",
    "/dead-letters": "Reason",
}
NARROW = {"width": 400, "height": 800}


def violations(page: Page, part: Locator) -> list[str]:
    """What axe finds in a part of the page; the rest is Airflow's."""
    part.evaluate("element => element.setAttribute('data-checked', '')")
    found: dict[str, Any] = Axe().run(page, context={"include": [["[data-checked]"]]}).response
    return [
        f"{each['impact']}: {each['help']}: {node['html'][:200]} {node['failureSummary']}"
        for each in found["violations"]
        if each["impact"] in SERIOUS
        for node in each["nodes"]
    ]


def our_part(page: Page) -> Locator:
    return page.get_by_role("heading", name="Delayed messages", level=1).locator("..")


#: The colour behind an element, which may be that of an outer one.
BACKGROUND = """element => {
    const colour = getComputedStyle(element).backgroundColor;
    const isSeen = colour !== "rgba(0, 0, 0, 0)" || element.parentElement === null;
    return isSeen ? colour : background(element.parentElement);
}"""


def background(part: Locator) -> str:
    colour: str = part.evaluate(f"element => {{ const background = {BACKGROUND}; return background(element); }}")
    return colour


@pytest.fixture
def filled(scene: Scene) -> Scene:
    """A scene with scheduled, dispatched, cancelled and dead messages."""
    Scene(scene.ledger).kill(1, reason="cannot be parsed")
    ids = scene.schedule(4, payload={"order": 1}, headers={"trace": "abc"})
    scene.ledger.cancel(ids[1:2])
    scene.ledger.expedite(ids[2:3])
    return scene


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_axe_finds_nothing_serious(people: People, filled: Scene, path: str, scheme: Any) -> None:
    """M6"""
    page = people.open("editor", path.format(filled.channel), color_scheme=scheme)
    expect(page.get_by_text(PAGES[path].format(filled.channel)).first).to_be_visible()
    assert page.evaluate("document.documentElement.classList.contains('dark')") is (scheme == "dark")
    assert violations(page, our_part(page)) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_a_dialog(people: People, filled: Scene, scheme: Any) -> None:
    page = people.open("editor", f"/messages/{filled.channel}-0000", color_scheme=scheme)
    page.get_by_role("button", name="Reschedule", exact=True).click()
    dialog = page.get_by_role("alertdialog", name="Reschedule")
    expect(dialog.get_by_role("button", name="Reschedule 1 message")).to_be_enabled()
    assert violations(page, dialog) == []


def test_dark_mode_of_airflow_applies(people: People, filled: Scene) -> None:
    page = people.open("editor", f"/messages?channel={filled.channel}", color_scheme="light")
    expect(page.get_by_text(f"{filled.channel}-0000")).to_be_visible()
    light = background(our_part(page))
    page.get_by_role("button", name="User").click()
    page.get_by_role("menuitem", name="Appearance").click()
    page.get_by_text("Dark Mode").click()
    page.wait_for_function("document.documentElement.classList.contains('dark')")
    # Colours fade: half-way there is no contrast.
    page.wait_for_function("document.getAnimations().every(({playState}) => playState === 'finished')")
    assert background(our_part(page)) != light
    assert violations(page, our_part(page)) == []


@pytest.mark.parametrize("path", PAGES)
def test_a_narrow_screen_needs_no_sideways_scrolling(people: People, filled: Scene, path: str) -> None:
    page = people.open("editor", path.format(filled.channel), viewport=NARROW)
    expect(page.get_by_text(PAGES[path].format(filled.channel)).first).to_be_visible()
    wider = "element => element.scrollWidth - element.clientWidth"
    assert page.locator(":root").evaluate(wider) <= 0
    assert our_part(page).evaluate(wider) <= 0
    box = our_part(page).bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= NARROW["width"]


def test_actions_can_be_reached_on_a_narrow_screen(people: People, filled: Scene) -> None:
    page = people.open("editor", f"/messages/{filled.channel}-0000", viewport=NARROW)
    for action in ("Reschedule", "Expedite", "Cancel"):
        page.get_by_role("button", name=action, exact=True).click()
        dialog = page.get_by_role("alertdialog", name=action)
        expect(dialog.get_by_role("button", name=f"{action} 1 message")).to_be_in_viewport()
        dialog.get_by_role("button", name="Back").click()
        expect(dialog).to_be_hidden()


def test_a_message_is_cancelled_with_the_keyboard_alone(people: People, filled: Scene) -> None:
    page = people.open("editor", f"/messages/{filled.channel}-0000")
    page.get_by_role("button", name="Cancel", exact=True).focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("alertdialog", name="Cancel")
    expect(dialog.get_by_role("button", name="Cancel 1 message")).to_be_enabled()
    # The safe button has the focus, so that Enter alone does no harm.
    expect(dialog.get_by_role("button", name="Back")).to_be_focused()
    page.keyboard.press("Tab")
    expect(dialog.get_by_role("button", name="Cancel 1 message")).to_be_focused()
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("region", name="History")).to_contain_text("cancelled")
