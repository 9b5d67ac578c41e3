"""A Spark standalone cluster for tests, and jobs submitted to it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from tests.given import do_without
from tools.servers.server import UnavailableError
from tools.servers.spark import HOST, QUICK_JVM, SparkCluster, client_environment

CONN_ID = "spark_test"
JOBS = Path(__file__).parent / "jobs"
#: Small and quick to start, on loopback.
CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": QUICK_JVM,
    "spark.driver.host": HOST,
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": QUICK_JVM,
    "spark.starvation.timeout": "1s",
    # So that a test can search it.
    "spark.eventLog.compress": "false",
}


@contextmanager
def private_cluster(
    run_dir: Path, *, worker: bool = True, workers: int = 1, cores: int = 1, many_hosts: bool = False
) -> Iterator[SparkCluster]:
    """Yield a cluster that a test may kill; skip if it cannot start, or fail on CI."""
    cluster = SparkCluster(workers=workers, cores=cores, many_hosts=many_hosts)
    try:
        try:
            cluster.start(run_dir, worker=worker)
        except UnavailableError as missing:
            do_without(str(missing))
        yield cluster
    finally:
        cluster.stop()


def connection_of(cluster: SparkCluster | None, **extra: Any) -> dict[str, Any]:
    """An Airflow connection to a cluster, or to Spark in the driver alone, in the form of its JSON."""
    if cluster is None:
        return {"conn_type": "spark", "host": "local[1]", "extra": extra}
    ports = {"rest-port": cluster.rest_port, "master-ui-port": cluster.ui_port}
    return {"conn_type": "spark", "host": cluster.url, "extra": {**ports, **extra}}


def submitting_environment(connection: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment in which a process submits jobs over this connection."""
    return {**client_environment(), f"AIRFLOW_CONN_{CONN_ID.upper()}": json.dumps(connection)}


@contextmanager
def submitting_to(cluster: SparkCluster | None, **extra: Any) -> Iterator[None]:
    """Within it, this process submits to the cluster over the connection CONN_ID."""
    with patch.dict(os.environ, submitting_environment(connection_of(cluster, **extra))):
        yield


def running_with(mark: str) -> list[psutil.Process]:
    """The processes with ``mark`` among their arguments, which those of a job have."""
    return [
        each
        for each in psutil.process_iter(["cmdline", "status"])
        if mark in " ".join(each.info["cmdline"] or ()) and each.info["status"] != psutil.STATUS_ZOMBIE
    ]
