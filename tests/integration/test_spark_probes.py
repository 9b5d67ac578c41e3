"""Probes of a real Spark standalone cluster: as it starts, loses its worker, its master, and comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from airflow_delay_provider.hooks.spark_cluster import find_cluster
from airflow_delay_provider.spark.probes import Probe, probe
from tests.servers.component import wait_for
from tests.servers.spark import SparkCluster
from tests.sparks import private_cluster

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
    """Probe the cluster through a connection with this extra."""

    def probe_with(**extra: Any) -> Probe:
        connection = {
            "conn_type": "spark",
            "host": cluster.url,
            "extra": {name.replace("_", "-"): value for name, value in extra.items()},
        }
        monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps(connection))
        return probe(find_cluster("cluster"), timeout=PATIENCE)

    return probe_with


def test_a_cluster_is_up_as_far_as_it_can_be_asked(cluster: SparkCluster, look: Any) -> None:
    by_page, by_rest = {"master_ui_port": cluster.ui_port}, {"rest_port": cluster.rest_port}

    # A master without workers: only its page knows.
    assert look() == Probe(True, f"{cluster.url.removeprefix('spark://')} accepts connections")
    assert look(**by_rest) == Probe(True, f"the master of http://127.0.0.1:{cluster.rest_port} is ALIVE")
    assert look(**by_page) == Probe(
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
