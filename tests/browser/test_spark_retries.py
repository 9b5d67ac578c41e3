"""A Spark job that fails for a passing reason, from its first failure to its success."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.acceptance.runs import Start
from tests.browser.people import People
from tests.browser.web import serving
from tests.given import do_without
from tests.sparks import JOBS
from tools.servers.kafka_distribution import find_java
from tools.servers.process import free_port
from tools.servers.server import UnavailableError

#: A JVM starts, twice.
SECONDS = 240


@pytest.fixture
def _java() -> None:
    try:
        find_java()
    except UnavailableError as missing:
        do_without(str(missing))


@pytest.mark.usefixtures("_java")
@pytest.mark.timeout(2 * SECONDS)
def test_a_failed_job_appears_and_retry_now_submits_it(people: People, start: Start, tmp_path: Path) -> None:
    """M5"""
    port = free_port()
    (tmp_path / "port").write_text(str(port))
    arguments = {"application": str(JOBS / "recovering.py"), "arguments": ["source", str(tmp_path)]}
    page = people.open("editor", "/retries")
    run = start("spark_patient", arguments)
    page.goto(f"{page.url}?run_id={run.run_id.replace('+', '%2B')}")
    waiting = page.get_by_role("region", name="Waiting Spark jobs")
    expect(waiting.get_by_role("link", name=re.compile("spark_patient . job"))).to_be_visible(timeout=SECONDS * 1000)
    expect(waiting).to_contain_text("transient")
    expect(waiting).to_contain_text("Connection refused")
    expect(waiting.get_by_role("table", name="Attempts").get_by_role("row")).to_have_count(2)
    assert len((tmp_path / "submissions").read_text().splitlines()) == 1

    with serving("orders", port=port):
        waiting.get_by_role("button", name="Retry now").click()
        dialog = page.get_by_role("alertdialog", name="Retry now")
        dialog.get_by_role("button", name="Retry 1 Spark job").click()
        expect(dialog).to_be_hidden()
        expect(page.get_by_text("No Spark job waits for a retry")).to_be_visible()
        run.wait()
    assert len((tmp_path / "submissions").read_text().splitlines()) == 2

    page.goto(f"{people.url}/dags/spark_patient/runs/{run.run_id}/tasks/job/plugin/delayed-messages-of-task")
    attempts = page.get_by_role("table", name="Attempts").get_by_role("row")
    expect(attempts).to_have_count(3)
    expect(attempts.last).to_contain_text("succeeded")
