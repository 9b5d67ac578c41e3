"""Health checks of a real Spark standalone cluster: as it starts, loses its worker, its master, and comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from airflow_delay_provider.spark.cluster.address import find_cluster
from airflow_delay_provider.spark.cluster.health_check import ClusterHealth, check_cluster
from tests.sparks import private_cluster
from tools.servers.component import wait_for
from tools.servers.spark import SparkCluster

SECONDS = 60
#: For each question, of a JVM that may be busy.
PATIENCE = timedelta(seconds=60)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    """A master that no worker has come to."""
    with private_cluster(tmp_path_factory.mktemp("spark"), worker=False) as started:
        yield started


@pytest.fixture
def look(cluster: SparkCluster, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Check the cluster through a connection with this extra."""

    def check_with(**extra: Any) -> ClusterHealth:
        connection = {
            "conn_type": "spark",
            "host": cluster.url,
            "extra": {name.replace("_", "-"): value for name, value in extra.items()},
        }
        monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps(connection))
        return check_cluster(find_cluster("cluster"), timeout=PATIENCE)

    return check_with


def test_a_cluster_is_up_as_far_as_it_can_be_asked(cluster: SparkCluster, look: Any) -> None:
    by_page, by_rest = {"master_ui_port": cluster.ui_port}, {"rest_port": cluster.rest_port}

    # A master without workers: only its page knows.
    assert look() == ClusterHealth(True, f"{cluster.url.removeprefix('spark://')} accepts connections")
    assert look(**by_rest) == ClusterHealth(True, f"the master of http://127.0.0.1:{cluster.rest_port} is ALIVE")
    assert look(**by_page) == ClusterHealth(
        False, f"the master of http://127.0.0.1:{cluster.ui_port} is ALIVE, but no worker is alive"
    )

    cluster.start_worker()
    assert look(**by_page).is_up

    cluster.kill_worker()
    wait_for(lambda: not look(**by_page).is_up, what="the master misses its worker", seconds=SECONDS)
    assert look().is_up

    cluster.kill_master()
    for extra in ({}, by_rest, by_page):
        gone = look(**extra)
        assert not gone.is_up
        assert gone.reason.endswith("cannot be reached: Connection refused")

    cluster.start_master()
    cluster.start_worker()
    for extra in ({}, by_rest, by_page):
        assert look(**extra).is_up
