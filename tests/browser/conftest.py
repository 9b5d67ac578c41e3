"""One real Airflow with three users for all browser tests, and browsers in which they are signed in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from tests.acceptance.runs import Run, Start
from tests.browser.people import People
from tests.browser.scene import Scene
from tests.given import require_server
from tools.servers import airflow as servers
from tools.servers.airflow_api import AirflowApi
from tools.servers.chromium import Chromium, launch

ROOT = Path(__file__).parents[2]
#: Their passwords are their names.
USERS = {"admin": "admin", "editor": "user", "viewer": "viewer"}
#: Longer than a refresh of the page on a busy machine.
PATIENCE_MS = 30_000


def config() -> servers.AirflowConfig:
    """Airflow and ledger on SQLite, with the DAGs of the acceptance tests."""
    return servers.AirflowConfig(
        dags={"acceptance": ROOT / "tests" / "acceptance" / "dags"},
        users=USERS,
        connections={"spark_local": '{"conn_type": "spark", "host": "local[1]"}'},
        python_path=[ROOT],
        settings={"dag_processor": {"min_file_process_interval": "86400"}},
    )


@pytest.fixture(scope="package")
def run_dir() -> Path:
    """The logs of Airflow and the screenshots of failed tests stay here."""
    return ROOT / ".run" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-browser-{os.getpid()}"


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    program = require_server(Chromium.variable, "Chromium")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright, launch(playwright, program) as launched:
        yield launched


# After the browser: without one Airflow need not start.
@pytest.fixture(scope="package")
def airflow(browser: Browser, run_dir: Path) -> Iterator[servers.Airflow]:
    with servers.Airflow(run_dir, config()) as started:
        started.prepare()
        started.start()
        yield started


@pytest.fixture(scope="package")
def api(airflow: servers.Airflow) -> Iterator[AirflowApi]:
    """The administrator's session."""
    with airflow.api("admin") as client:
        yield client


@pytest.fixture(scope="package")
def ledger(airflow: servers.Airflow) -> Iterator[EmbeddedBroker]:
    """The ledger that the pages show."""
    with EmbeddedBroker(Ledger(airflow.ledger_url)) as opened:
        yield opened


@pytest.fixture
def scene(ledger: EmbeddedBroker) -> Scene:
    """A channel of the test's own."""
    return Scene(ledger)


@pytest.fixture
def start(api: AirflowApi) -> Start:
    """Start a run of a DAG."""

    def start_run(dag_id: str, *arguments: object) -> Run:
        api.wait_for_dag(dag_id)
        return Run(api, dag_id, api.trigger(dag_id, *arguments))

    return start_run


@pytest.fixture(scope="package")
def _all_people(browser: Browser, airflow: servers.Airflow) -> People:
    return People(browser, airflow.url, patience_ms=PATIENCE_MS)


@pytest.fixture
def people(_all_people: People, request: pytest.FixtureRequest, run_dir: Path) -> Iterator[People]:
    """Browsers of the users; what they showed last is saved if the test fails."""
    yield _all_people
    if request.node.stash.get(_HAS_FAILED, False):
        name = re.sub(r"\W+", "-", request.node.name).strip("-")
        _all_people.save_screenshots(run_dir / "screenshots" / name)
    _all_people.leave()


_HAS_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[_HAS_FAILED] = True
    return report
