"""From a connection of the Spark provider to the cluster that it means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.sdk import BaseHook

from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.cluster.address import ClusterAddress, ClusterKind, find_cluster, master_of

SECRET = "s3cret-passw0rd"


@pytest.fixture
def define(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Defines the connection ``cluster`` by a URI or by fields, and returns its id."""

    def define_connection(given: str | dict[str, Any]) -> str:
        monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", given if isinstance(given, str) else json.dumps(given))
        return "cluster"

    return define_connection


CONNECTIONS = [
    ({"conn_type": "spark", "host": "spark://10.0.0.1", "port": 7077}, "spark://10.0.0.1:7077"),
    ({"conn_type": "spark", "host": "spark://10.0.0.1:7077"}, "spark://10.0.0.1:7077"),
    ({"conn_type": "spark", "host": "spark://h1:7077,h2:7077"}, "spark://h1:7077,h2:7077"),
    ({"conn_type": "spark", "host": "spark://h1:7077,h2", "port": 7078}, "spark://h1:7077,h2:7078"),
    ({"conn_type": "spark", "host": "10.0.0.1", "port": 7077}, "spark://10.0.0.1:7077"),
    ("spark://10.0.0.1:7077?deploy-mode=cluster", "spark://10.0.0.1:7077"),
    (f"spark://me:{SECRET}@10.0.0.1:7077", "spark://10.0.0.1:7077"),
    ("spark://yarn", "yarn:cluster"),
    ({"conn_type": "spark", "host": "yarn"}, "yarn:cluster"),
    ({"conn_type": "yarn", "host": ""}, "yarn:cluster"),
    ("spark://local", "local"),
    ({"conn_type": "spark", "host": "local[*]"}, "local"),
    ({"conn_type": "spark", "host": "k8s://https://10.0.0.1", "port": 6443}, "k8s://https://10.0.0.1:6443"),
    ({"conn_type": "k8s", "host": "https://10.0.0.1", "port": 6443}, "k8s://https://10.0.0.1:6443"),
    ("k8s://10.0.0.1:443", "k8s://https://10.0.0.1:443"),
]


@pytest.mark.parametrize(("given", "name"), CONNECTIONS)
def test_a_connection_names_its_cluster_without_its_secrets(define: Any, given: Any, name: str) -> None:
    cluster = find_cluster(define(given))
    assert (cluster.name, cluster.conn_id) == (name, "cluster")
    assert SECRET not in repr(cluster)


@pytest.mark.parametrize("given", [given for given, _ in CONNECTIONS])
def test_the_master_is_the_one_that_the_provider_submits_to(
    define: Any, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_HERE", "spark://local")
    hook = SparkSubmitHook(conn_id="here")
    # Made for Kubernetes it would ask for a Kubernetes client.
    hook._conn_id = define(given)
    assert master_of(BaseHook.get_connection("cluster")) == hook._resolve_connection()["master"]


def test_the_extra_names_the_urls_of_the_cluster(define: Any) -> None:
    extra = {"rest-port": "6067", "rest-scheme": "https", "master-ui-port": 8080, "deploy-mode": "cluster"}
    conn_id = define({"conn_type": "spark", "host": "h", "port": 7077, "password": SECRET, "extra": extra})
    assert find_cluster(conn_id, check="my.check") == ClusterAddress(
        kind=ClusterKind.STANDALONE,
        name="spark://h:7077",
        masters=("h:7077",),
        rest_urls=("https://h:6067",),
        web_urls=("http://h:8080",),
        check="my.check",
        conn_id="cluster",
    )


def test_the_resource_manager_is_the_one_that_the_provider_polls(define: Any) -> None:
    extra = {"yarn_resourcemanager_webapp_address": "rm:8088", "keytab": SECRET, "principal": "me", "queue": "root"}
    cluster = find_cluster(define({"conn_type": "spark", "host": "yarn", "extra": extra}))
    assert (cluster.name, cluster.web_urls) == ("yarn:http://rm:8088", ("http://rm:8088",))
    assert SECRET not in repr(cluster)


def test_a_connection_that_is_not_defined_means_yarn_as_it_does_for_the_provider() -> None:
    assert find_cluster("nobody_defined_this").name == "yarn:nobody_defined_this"


@pytest.mark.parametrize("field", ["rest-port", "master-ui-port"])
@pytest.mark.parametrize("port", ["many", "-1", 99999, 0])
def test_a_wrong_port_is_refused(define: Any, field: str, port: object) -> None:
    extra = {field: port}
    with pytest.raises(ConfigurationError, match=f"{field}: .*; give "):
        find_cluster(define({"conn_type": "spark", "host": "h", "port": 7077, "extra": extra}))
