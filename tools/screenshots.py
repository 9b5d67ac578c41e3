"""``python -m tools.screenshots``: write the pictures of the UI into docs/images, from the Airflow of the demo."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from airflow_delay_provider.links import UI_ROUTE
from demo.report import Report
from demo.run import ROOT, TRAFFIC_DAG, fill_pages, prepare_spark, start
from demo.spark_tour import CONNECTIONS, SPARK_DAG, TASK
from tools.servers.airflow import Airflow, AirflowConfig
from tools.servers.airflow_api import AirflowApi
from tools.servers.chromium import Chromium, find_chromium, launch

IMAGES = ROOT / "docs" / "images"
WIDTH = 1400
#: A Spark job has to fail before there is a retry.
FILL_SECONDS = 300
PATIENCE_MS = 30_000
HISTORY_MINUTES = 8
#: Enough for a page without photographs, and a third of the size.
COLOURS = 256


def main() -> int:
    program = os.environ.get(Chromium.variable) or find_chromium(instead=f"or set {Chromium.variable}")
    run_dir = ROOT / ".run" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-screenshots-{os.getpid()}"
    report = Report()
    if not prepare_spark(run_dir, report):
        return 1
    IMAGES.mkdir(parents=True, exist_ok=True)
    config = AirflowConfig(dags={"examples": ROOT / "dags"}, parallelism=3, connections=CONNECTIONS)
    with Airflow(run_dir, config) as airflow, sync_playwright() as playwright, launch(playwright, program) as browser:
        start(airflow, report)
        fill_pages(airflow, report, with_spark=True)
        with airflow.api() as api:
            retry = wait_until_filled(airflow, api)
            later = (datetime.now(UTC) + timedelta(minutes=30)).isoformat()
            message = find(api, "messages", dag_id=TRAFFIC_DAG, state="SCHEDULED", due_from=later)[0]
            report.step("the pages are filled")
            shoot = Camera(browser, airflow.url, report)
            # First what lasts only until the job is submitted again.
            shoot("retries", "/retries", "Last failure")
            shoot.task_tab("task-tab", retry["message"]["origin"])
            shoot("messages", "/messages?state=SCHEDULED", message["channel"])
            shoot("message", f"/messages/{quote(message['id'], safe='')}", "History")
            shoot("dead-letters", "/dead-letters", "Reason", height=500)
            report.step(f"more messages for {HISTORY_MINUTES} minutes, so that the charts have something to show")
            for _ in range(HISTORY_MINUTES):
                api.trigger(TRAFFIC_DAG, {})
                time.sleep(60)
        for scheme in ("light", "dark"):
            shoot(f"overview-{scheme}", "", "Dispatchers", height=1250, scheme=scheme)
    return 0


class Camera:
    """Takes pictures of pages."""

    def __init__(self, browser: Browser, url: str, report: Report) -> None:
        self._browser = browser
        self._url = url
        self._report = report

    def __call__(
        self, name: str, path: str, text: str, *, height: int = 800, scheme: Literal["light", "dark"] = "light"
    ) -> None:
        """Open a page of the UI, wait for a text on it, and take the picture."""
        self._take(name, f"/plugin/{UI_ROUTE}{path}", text, height=height, scheme=scheme)

    def task_tab(self, name: str, origin: dict[str, Any]) -> None:
        """Take a picture of the tab of a task instance."""
        place = f"/dags/{origin['dag_id']}/runs/{quote(origin['run_id'])}/tasks/{origin['task_id']}"
        self._take(name, f"{place}/plugin/{UI_ROUTE}-of-task", "Messages of this task", height=900, scheme="light")

    def _take(self, name: str, path: str, text: str, *, height: int, scheme: Literal["light", "dark"]) -> None:
        context = self._browser.new_context(viewport={"width": WIDTH, "height": height}, color_scheme=scheme)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.goto(f"{self._url}{path}")
        page.get_by_text(text).first.wait_for()
        wait_until_loaded(page)
        file = IMAGES / f"{name}.png"
        page.screenshot(path=file)
        context.close()
        shrink(file)
        self._report.step(f"{file.relative_to(ROOT)}: {file.stat().st_size // 1024} kB")


def wait_until_loaded(page: Page) -> None:
    """Wait until nothing is loading any more."""
    page.wait_for_load_state("networkidle")
    page.wait_for_function("document.querySelectorAll('[aria-label=Loading]').length === 0")


def shrink(file: Path) -> None:
    with Image.open(file) as picture:
        small = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(file, optimize=True)


def wait_until_filled(airflow: Airflow, api: AirflowApi) -> dict[str, Any]:
    """Wait for messages, dead letters and a Spark retry, and return the retry."""

    def look() -> dict[str, Any] | None:
        retries = find(api, "retries", dag_id=SPARK_DAG, task_id=TASK)
        filled = find(api, "messages", dag_id=TRAFFIC_DAG, state="SCHEDULED") and find(api, "dead-letters")
        return retries[0] if retries and filled else None

    found: dict[str, Any] = airflow.wait_for(look, what="the pages are filled", seconds=FILL_SECONDS)
    return found


def find(api: AirflowApi, what: str, **params: str) -> Sequence[dict[str, Any]]:
    """Return the first page of a list of the HTTP API."""
    found: Sequence[dict[str, Any]] = api.get(f"/delay/v1/{what}", **params)[
        "retries" if what == "retries" else "messages"
    ]
    return found


if __name__ == "__main__":
    sys.exit(main())
