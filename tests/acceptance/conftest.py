"""One real Airflow for all acceptance tests: four components, a dispatcher, PostgreSQL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from airflow_delay_provider.brokers.embedded import EmbeddedBroker
from airflow_delay_provider.ledger.database import Ledger
from tests.databases import fresh_database
from tests.servers.airflow import Airflow, AirflowConfig
from tests.servers.airflow_api import AirflowApi

ROOT = Path(__file__).parents[2]
USERS = {"admin": "admin", "viewer": "viewer"}
# A triggerer that was killed is given up after 30 s by default; its successor waits for that.
SETTINGS = {"triggerer": {"triggerer_health_check_threshold": "10", "job_heartbeat_sec": "2"}}


@pytest.fixture(scope="session")
def airflow() -> Iterator[Airflow]:
    """Airflow with the examples and the DAGs of these tests; its logs stay under .run/."""
    run_dir = ROOT / ".run" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-acceptance-{os.getpid()}"
    with fresh_database() as database_url, fresh_database() as ledger_url:
        config = AirflowConfig(
            dags={"examples": ROOT / "dags", "acceptance": ROOT / "tests" / "acceptance" / "dags"},
            database_url=database_url,
            ledger_url=ledger_url,
            users=USERS,
            python_path=[ROOT],
            settings=SETTINGS,
        )
        with Airflow(run_dir, config) as started:
            started.prepare()
            started.start()
            yield started


@pytest.fixture(scope="session")
def api(airflow: Airflow) -> Iterator[AirflowApi]:
    """The administrator's session."""
    with airflow.api("admin") as client:
        yield client


@pytest.fixture(scope="session")
def broker(airflow: Airflow) -> Iterator[EmbeddedBroker]:
    """The broker that the DAGs use."""
    with EmbeddedBroker(Ledger(airflow.ledger_url)) as opened:
        yield opened
