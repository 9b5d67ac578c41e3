"""One Spark session for all tests of the pipeline, and a standalone cluster with two workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.given import do_without
from tests.sparks import CONF, private_cluster
from tools.servers.server import UnavailableError
from tools.servers.spark import SparkCluster, client_environment, find_kafka_connector


@pytest.fixture(scope="session")
def kafka_connector() -> str:
    """The value of ``spark.jars`` with which Spark can use Kafka."""
    try:
        return ",".join(str(jar) for jar in find_kafka_connector())
    except UnavailableError as missing:
        do_without(str(missing))


@pytest.fixture(scope="session")
def spark(kafka_connector: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A local session with two cores; its executors are Python processes of this machine."""
    os.environ.update(client_environment())
    builder = SparkSession.builder.master("local[2]").appName("pipeline tests")
    settings = {
        **CONF,
        "spark.driver.memory": "1g",
        "spark.jars": kafka_connector,
        # A producer would try for minutes to reach a broker that was a test's own.
        "spark.kafka.producer.cache.evictorThreadRunInterval": "5s",
        "spark.kafka.producer.cache.timeout": "5s",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        "spark.sql.session.timeZone": "UTC",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    yield session
    session.stop()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    """A master and two workers with one core each, on hosts of their own."""
    with private_cluster(Path(tmp_path_factory.mktemp("cluster")), workers=2, many_hosts=True) as running:
        yield running
