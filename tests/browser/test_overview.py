"""The overview: figures, and what is said about a dispatcher that dies."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.browser.people import People
from tests.browser.scene import Scene
from tools.servers.airflow import Airflow

WITHIN_MS = 15_000


def test_the_overview_counts_messages_and_leads_to_them(people: People, scene: Scene) -> None:
    ids = scene.schedule(3)
    page = people.open("viewer")
    page.get_by_role("link", name="Scheduled", exact=True).click()
    expect(page).to_have_url(re.compile("state=SCHEDULED"))
    page.get_by_label("Channel").fill(scene.channel)
    expect(page.get_by_role("link", name=ids[0])).to_be_visible()


def test_a_killed_dispatcher_is_reported_with_the_remedy_and_its_return_too(people: People, airflow: Airflow) -> None:
    page = people.open("viewer")
    problems = page.get_by_role("region", name="Problems")
    expect(problems).to_contain_text("Everything works")
    airflow.dispatcher.kill()
    try:
        expect(problems).to_contain_text("Start one with `airflow delay dispatcher`", timeout=WITHIN_MS)
        expect(problems).to_contain_text("No dispatcher has been seen since")
        expect(page.get_by_role("region", name="Dispatchers")).to_contain_text("gone")
    finally:
        airflow.dispatcher.start()
        airflow.wait_for_dispatcher()
    expect(problems).to_contain_text("Everything works", timeout=WITHIN_MS)
