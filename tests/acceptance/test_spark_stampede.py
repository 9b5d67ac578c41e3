"""Tasks that fail together are retried one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.spark_stampede import stampede
from tests.acceptance.test_spark_retries import define
from tests.sparks import connection_of, private_cluster
from tools.servers.airflow import Airflow
from tools.servers.airflow_api import AirflowApi


@pytest.mark.timeout(900)
def test_tasks_that_failed_together_come_back_within_the_bucket_and_none_runs_twice_at_once(
    airflow: Airflow, api: AirflowApi, tmp_path: Path
) -> None:
    with private_cluster(tmp_path) as cluster:
        define(api, "spark_standalone", connection_of(cluster))
        figures = stampede(airflow, api, cluster, tmp_path, tasks=10, kills=1, seconds=300)
    assert figures.succeeded == figures.tasks
    assert figures.overlaps == []
    assert figures.repeated == []
    assert figures.is_within_bucket, figures
    # Each has failed once, but those that came when the outage was known.
    assert 1 <= figures.submissions_down <= figures.tasks
    assert figures.submissions_up == figures.tasks + figures.workers_killed
