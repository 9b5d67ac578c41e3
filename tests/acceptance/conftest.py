"""One real Airflow for all acceptance tests: four components, a dispatcher, PostgreSQL."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from tests.acceptance import spark_stampede
from tests.acceptance.runs import Run, Start
from tests.databases import fresh_database
from tests.rabbits import URL_VARIABLE as RABBITMQ_VARIABLE
from tests.rabbits import connection_of
from tools.servers.airflow import Airflow, AirflowConfig
from tools.servers.airflow_api import AirflowApi

ROOT = Path(__file__).parents[2]
USERS = {"admin": "admin", "viewer": "viewer"}
SETTINGS = {
    **spark_stampede.SETTINGS,
    # Parsed once: these DAGs are not edited while they run.
    "dag_processor": {"min_file_process_interval": "86400"},
    "core": {"test_connection": "Enabled"},
}


def connections() -> dict[str, str]:
    """The brokers there are: tests that need one that is missing skip, or fail on CI."""
    url = os.environ.get(RABBITMQ_VARIABLE)
    if not url:
        return {}
    good = connection_of(url)
    return {
        "rabbitmq_default": json.dumps(good),
        "rabbitmq_wrong_password": json.dumps(good | {"password": "s3cret-but-wrong"}),
    }


# Not of the session: a worker that goes on with other tests stops it, as it keeps processors busy.
@pytest.fixture(scope="package")
def airflow() -> Iterator[Airflow]:
    """Airflow with the examples and the DAGs of these tests; its logs stay under .run/."""
    run_dir = ROOT / ".run" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-acceptance-{os.getpid()}"
    with fresh_database() as database_url, fresh_database() as ledger_url:
        config = AirflowConfig(
            dags={"examples": ROOT / "dags", "acceptance": ROOT / "tests" / "acceptance" / "dags"},
            database_url=database_url,
            ledger_url=ledger_url,
            users=USERS,
            connections=connections(),
            python_path=[ROOT],
            settings=SETTINGS,
        )
        with Airflow(run_dir, config) as started:
            started.prepare()
            started.start()
            yield started


@pytest.fixture(scope="package")
def api(airflow: Airflow) -> Iterator[AirflowApi]:
    """The administrator's session."""
    with airflow.api("admin") as client:
        yield client


@pytest.fixture(scope="package")
def broker(airflow: Airflow) -> Iterator[EmbeddedBroker]:
    """The broker that the DAGs use."""
    with EmbeddedBroker(Ledger(airflow.ledger_url)) as opened:
        yield opened


@pytest.fixture
def start(api: AirflowApi) -> Start:
    """Start a run of a DAG."""

    def start_run(dag_id: str, *arguments: Any, **options: Any) -> Run:
        api.wait_for_dag(dag_id)
        return Run(api, dag_id, api.trigger(dag_id, *arguments, **options))

    return start_run
