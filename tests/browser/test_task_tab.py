"""The tab on the page of a task instance."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from airflow_delay_provider.domain.message import Origin
from tests.acceptance.runs import SUCCESS, Start
from tests.browser.people import People
from tests.browser.scene import Scene


def test_the_tab_shows_the_messages_of_its_task_only(people: People, start: Start, scene: Scene) -> None:
    run = start("controlled")
    for task in ("wanted", "unwanted"):
        run.wait_for_task(task, SUCCESS)
    scene.schedule(1, origin=Origin(dag_id="controlled", run_id="manual__1", task_id="wanted"))
    page = people.open("editor", f"/messages?run_id={run.run_id.replace('+', '%2B')}")
    page.get_by_role("link", name=re.compile("controlled . wanted")).click()
    # The first one is in the navigation.
    page.get_by_role("link", name="Delayed messages").nth(1).click()
    mine = page.get_by_role("region", name="Messages of this task")
    expect(mine.get_by_role("row")).to_have_count(2)
    expect(mine.get_by_role("link", name=run.result("wanted"))).to_be_visible()
    expect(page.get_by_text(run.result("unwanted"))).to_have_count(0)

    mine.get_by_role("link", name=run.result("wanted")).click()
    expect(page.get_by_role("heading", name=run.result("wanted"))).to_be_visible()
    expect(page.get_by_role("region", name="Payload")).to_contain_text("wanted")


def test_the_extra_link_of_a_task_leads_to_its_message(people: People, start: Start) -> None:
    run = start("controlled")
    run.wait_for_task("wanted", SUCCESS)
    [link] = run.api.links(run.dag_id, run.run_id, "wanted").values()
    page = people.open("viewer", "/messages")
    page.goto(link)
    expect(page.get_by_role("heading", name=re.compile(run.result("wanted")))).to_be_visible()
