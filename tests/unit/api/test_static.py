"""The files of the UI, as the browser gets them from the plugin."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from airflow_delay_provider.api.app import create_app
from airflow_delay_provider.api.static import static_url
from airflow_delay_provider.links import UI_ROUTE
from airflow_delay_provider.plugins.delay import DelayPlugin
from tools.openapi import TARGET, describe_api


@pytest.fixture
def browser() -> TestClient:
    return TestClient(create_app(), base_url="http://airflow")


def path_of(url: str) -> str:
    """Return the path below the mount point of the plugin."""
    return url.removeprefix("delay")


def test_the_bundle_needs_no_login_and_is_kept_for_ever(browser: TestClient) -> None:
    answer = browser.get(path_of(static_url("main.js")))
    assert answer.status_code == 200
    assert "javascript" in answer.headers["content-type"]
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"


@pytest.mark.parametrize("query", ["", "?v=0123456789abcdef"])
def test_a_url_that_does_not_name_the_content_is_asked_for_again_each_time(browser: TestClient, query: str) -> None:
    answer = browser.get(f"/static/main.js{query}")
    assert answer.headers["cache-control"] == "no-cache"
    assert browser.get("/static/main.js", headers={"If-None-Match": answer.headers["etag"]}).status_code == 304


@pytest.mark.parametrize("path", ["../dist/../../plugins/delay.py", "%2e%2e/%2e%2e/plugins/delay.py", "nothing.js", ""])
def test_no_other_file_is_served(browser: TestClient, path: str) -> None:
    assert browser.get(f"/static/{path}").status_code == 404


def test_airflow_finds_the_page_and_the_tab_of_a_task_under_any_base_url() -> None:
    page, tab = DelayPlugin().react_apps
    assert (page["destination"], page["url_route"]) == ("nav", UI_ROUTE)
    assert (tab["destination"], tab["url_route"]) == ("task_instance", f"{UI_ROUTE}-of-task")
    # Airflow resolves a relative address against its base URL.
    assert page["bundle_url"] == tab["bundle_url"] == static_url("main.js")
    assert not page["bundle_url"].startswith(("/", "http"))


def test_the_types_of_the_ui_are_those_of_this_api() -> None:
    assert TARGET.read_text() == describe_api(), "Run python -m tools.openapi, then npm run types in ui/ and ./dev ui."
