"""Which responses of a cluster count as up, and that a check never takes longer than its timeout."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.cluster.address import ClusterAddress, ClusterKind, Hints, parse_address
from airflow_delay_provider.spark.cluster.health_check import ClusterHealth, check_cluster
from tests.certificates import Authority
from tests.unit.spark.answering import answering, silent
from tools.servers.component import wait_for
from tools.servers.process import free_port

PATIENCE = timedelta(seconds=20)
STATUS = "/v1/submissions/status/no-such-driver"
INFO, METRICS = "/ws/v1/cluster/info", "/ws/v1/cluster/metrics"
ACTIVE = {"clusterInfo": {"state": "STARTED", "haState": "ACTIVE"}}
STANDBY_MASTER = {"status": "STANDBY", "aliveworkers": 0, "workers": []}


def port_of(host_port: str) -> int:
    return int(host_port.rpartition(":")[2])


@pytest.mark.parametrize(
    ("master", "kind", "name"),
    [
        ("spark://10.0.0.1:7077", "standalone", "spark://10.0.0.1:7077"),
        ("spark://B:7077, a:7078", "standalone", "spark://a:7078,b:7077"),
        ("spark://[::1]:7077", "standalone", "spark://[::1]:7077"),
        ("spark://me:secret@h:7077", "standalone", "spark://h:7077"),
        ("yarn", "yarn", "yarn:nightly"),
        ("yarn://rm", "yarn", "yarn:nightly"),
        ("k8s://https://10.0.0.1:6443/", "kubernetes", "k8s://https://10.0.0.1:6443"),
        ("k8s://10.0.0.1:443", "kubernetes", "k8s://https://10.0.0.1:443"),
        ("k8s://http://localhost:8001", "kubernetes", "k8s://http://localhost:8001"),
        ("k8s://https://me:secret@gate/clusters/c1", "kubernetes", "k8s://https://gate/clusters/c1"),
        ("local", "local", "local"),
        ("local[*]", "local", "local"),
        ("local[2,3]", "local", "local"),
        ("local-cluster[2,1,1024]", "local", "local"),
    ],
)
def test_different_spellings_of_a_master_have_one_name(master: str, kind: str, name: str) -> None:
    address = parse_address(master, conn_id="nightly")
    assert (address.kind, address.name) == (kind, name)
    assert "secret" not in repr(address)


def test_urls_of_a_cluster_are_known_only_if_the_connection_names_their_ports() -> None:
    hints = Hints(master_ui_port=8080, rest_scheme="https", rest_port=6066)
    assert parse_address("spark://b:7077,a:7077", hints=hints) == ClusterAddress(
        kind=ClusterKind.STANDALONE,
        name="spark://a:7077,b:7077",
        masters=("a:7077", "b:7077"),
        rest_urls=("https://a:6066", "https://b:6066"),
        web_urls=("http://a:8080", "http://b:8080"),
    )
    assert parse_address("spark://a:7077").rest_urls == parse_address("spark://a:7077").web_urls == ()


def test_resource_managers_name_the_cluster_where_they_are_known() -> None:
    address = parse_address("yarn", conn_id="nightly", hints=Hints(yarn_resourcemanager_webapp_address="rm2:8088,rm1"))
    assert (address.name, address.web_urls) == ("yarn:http://rm1,http://rm2:8088", ("http://rm1", "http://rm2:8088"))


@pytest.mark.parametrize(
    ("master", "hints", "field"),
    [
        ("spark://10.0.0.1", {}, "host"),
        ("spark://a,b:7077", {}, "host"),
        ("spark://a:7077:7077", {}, "host"),
        ("spark://me:secret@a:port", {}, "host"),
        ("spark://", {}, "host"),
        ("mesos://me:secret@a:5050", {}, "host"),
        ("", {}, "host"),
        ("k8s://ftp://a", {}, "host"),
        ("k8s://", {}, "host"),
        ("spark://a:7077", {"master_ui_port": 80800}, "master-ui-port"),
        ("yarn", {"yarn_resourcemanager_webapp_address": "ftp://me:secret@a"}, "yarn_resourcemanager_webapp_address"),
        ("spark://a:7077", {"rest_port": 6066, "rest_scheme": "gopher"}, "rest-scheme, rest-port"),
        ("yarn", {"yarn_resourcemanager_webapp_address": "http://"}, "yarn_resourcemanager_webapp_address"),
    ],
)
def test_a_wrong_address_is_refused_with_its_field_and_no_secret(master: str, hints: Any, field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{field}: .*give ") as refused:
        parse_address(master, hints=Hints(**hints))
    assert "secret" not in str(refused.value)


def test_a_master_of_another_kind_is_asked_through_the_users_function() -> None:
    address = parse_address("mesos://me:secret@a:5050", conn_id="old", check=f"{__name__}.is_nightly")
    assert (address.name, check_cluster(address).is_up) == ("mesos://a:5050", False)


def test_local_spark_is_always_up() -> None:
    assert check_cluster(parse_address("local[*]")) == ClusterHealth(True, "Spark runs where the task runs")


def test_a_port_that_refuses_is_down() -> None:
    where = f"127.0.0.1:{free_port()}"
    assert check_cluster(parse_address(f"spark://{where}")) == ClusterHealth(
        False, f"{where} cannot be reached: Connection refused"
    )


def test_a_host_that_is_not_found_is_down() -> None:
    found = check_cluster(parse_address("spark://no-such-host.invalid:7077"), timeout=timedelta(seconds=20))
    assert not found.is_up
    assert "no-such-host.invalid:7077" in found.reason


def test_a_master_that_listens_is_up_where_nothing_else_can_be_asked() -> None:
    with silent() as master:
        assert check_cluster(parse_address(f"spark://{master}")) == ClusterHealth(True, f"{master} accepts connections")


def test_one_of_several_masters_is_enough() -> None:
    refusing = f"127.0.0.1:{free_port()}"
    with silent() as master:
        assert check_cluster(parse_address(f"spark://{refusing},{master}")).is_up


@pytest.mark.parametrize(
    ("answer", "is_up", "reason"),
    [
        ({"status": "ALIVE", "aliveworkers": 2}, True, "ALIVE with 2 workers"),
        ({"status": "ALIVE", "aliveworkers": 0}, False, "no worker is alive"),
        (STANDBY_MASTER, False, "is STANDBY"),
        ({"status": "RECOVERING", "aliveworkers": 3}, False, "is RECOVERING"),
        (401, True, "does not show us its state"),
        (302, False, "answers 302"),
        (503, False, "answers 503"),
        (b"<html>another server</html>", False, "is it the right URL"),
        (b"[]", False, "is it the right URL"),
    ],
)
def test_a_master_is_up_when_its_page_says_so(answer: Any, is_up: bool, reason: str) -> None:
    seen: list[str] = []
    with answering({"/json/": answer, "/elsewhere": {"status": "ALIVE", "aliveworkers": 1}}, seen=seen) as master:
        found = check_cluster(parse_address(f"spark://{master}", hints=Hints(master_ui_port=port_of(master))))
    assert found.is_up is is_up
    assert reason in found.reason
    assert seen == ["/json/"], "a redirect was followed"


def test_the_page_of_a_standby_master_does_not_hide_the_active_one() -> None:
    with (
        answering({"/json/": STANDBY_MASTER}) as standby,
        answering({"/json/": {"status": "ALIVE"}}, host="127.0.0.2", port=port_of(standby)) as active,
    ):
        hints = Hints(master_ui_port=port_of(standby))
        assert not check_cluster(parse_address(f"spark://{standby}", hints=hints)).is_up
        assert check_cluster(parse_address(f"spark://{standby},{active}", hints=hints)).is_up


@pytest.mark.parametrize(
    ("answer", "is_up", "state"),
    [
        ({"submissionId": "no-such-driver", "success": False}, True, "ALIVE"),
        (
            {
                "success": False,
                "message": "Exception from the cluster:\njava.lang.Exception: Current state is not alive: STANDBY. "
                "Can only request driver status in ALIVE state.",
            },
            False,
            "STANDBY",
        ),
    ],
)
def test_a_master_is_up_when_its_rest_server_looks_for_drivers(answer: Any, is_up: bool, state: str) -> None:
    with answering({STATUS: answer}) as master:
        hints = Hints(rest_port=port_of(master))
        expected = ClusterHealth(is_up, f"the master of http://{master} is {state}")
        assert check_cluster(parse_address(f"spark://{master}", hints=hints)) == expected


def test_a_rest_server_that_refuses_is_down_although_the_master_listens() -> None:
    with silent() as master:
        assert not check_cluster(parse_address(f"spark://{master}", hints=Hints(rest_port=free_port()))).is_up


@pytest.mark.parametrize(
    ("answers", "is_up", "reason"),
    [
        ({INFO: ACTIVE, METRICS: {"clusterMetrics": {"activeNodes": 3}}}, True, "is ACTIVE"),
        ({INFO: ACTIVE, METRICS: {"clusterMetrics": {"activeNodes": 0}}}, False, "no node is"),
        ({INFO: ACTIVE, METRICS: 403}, True, "is ACTIVE"),
        ({INFO: ACTIVE, METRICS: 500}, True, "is ACTIVE"),
        ({INFO: ACTIVE}, True, "is ACTIVE"),
        ({INFO: {"clusterInfo": {"state": "STARTED", "haState": "STANDBY"}}}, False, "is STARTED, STANDBY"),
        ({INFO: {"clusterInfo": {"state": "INITED", "haState": "INITIALIZING"}}}, False, "INITIALIZING"),
        ({INFO: {}}, False, "is None"),
        ({INFO: 401}, True, "does not show us its state"),
        ({}, False, "answers 404"),
    ],
)
def test_yarn_is_up_when_a_resource_manager_is_active_and_has_nodes(answers: Any, is_up: bool, reason: str) -> None:
    with answering(answers) as manager:
        found = check_cluster(parse_address("yarn", hints=Hints(yarn_resourcemanager_webapp_address=manager)))
    assert found.is_up is is_up
    assert reason in found.reason


def test_yarn_counts_as_up_without_a_resource_manager_to_check() -> None:
    assert check_cluster(parse_address("yarn")).is_up


@pytest.mark.parametrize(
    ("answer", "is_up"), [(b"ok", True), (401, True), (403, True), (500, False), (404, False), (302, False)]
)
def test_kubernetes_is_up_when_its_api_server_is_ready_or_asks_who_we_are(answer: Any, is_up: bool) -> None:
    with answering({"/readyz": answer}) as server:
        assert check_cluster(parse_address(f"k8s://http://{server}")).is_up is is_up


def test_a_certificate_is_verified_and_one_of_a_private_authority_still_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    with answering({"/readyz": b"ok"}, certificate=authority.issue("localhost", server=True)) as server:
        address = parse_address(f"k8s://{server.replace('127.0.0.1', 'localhost')}")
        private = check_cluster(address, timeout=PATIENCE)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        trusted = check_cluster(address, timeout=PATIENCE)
    assert (private.is_up, trusted.is_up) == (True, True)
    assert "not trusted" in private.reason
    assert "is ready" in trusted.reason


def test_a_server_that_does_not_speak_http_is_down() -> None:
    with answering({}, certificate=None) as server:
        assert not check_cluster(parse_address(f"k8s://https://{server}"), timeout=PATIENCE).is_up


def test_a_server_that_never_answers_is_down_in_time() -> None:
    with silent() as server:
        address = parse_address(f"k8s://http://{server}")
        started = time.monotonic()
        found = check_cluster(address, timeout=timedelta(seconds=1))
    reported, time_is_up = f"http://{server} cannot be reached: timed out", f"{address.name} did not respond within 1 s"
    assert found in (ClusterHealth(False, reported), ClusterHealth(False, time_is_up))
    assert time.monotonic() - started < 20


def test_the_first_of_two_servers_cannot_take_all_the_time() -> None:
    with silent() as dead, answering({INFO: ACTIVE}) as alive:
        both = ",".join(sorted((f"http://{dead}", f"http://{alive}")))
        address = parse_address("yarn", hints=Hints(yarn_resourcemanager_webapp_address=both))
        assert check_cluster(address, timeout=timedelta(seconds=4)).is_up


def is_nightly(conn_id: str) -> bool:
    return conn_id == "nightly"


def is_broken(conn_id: str) -> bool:
    raise ConnectionError(f"{conn_id}: password=s3cret was refused")


def says_nothing(conn_id: str) -> None:
    """A function without a return statement."""


not_a_function = 1


@pytest.mark.parametrize("master", ["spark://127.0.0.1:1", "yarn", "local"])
def test_the_users_function_is_asked_instead_of_the_cluster(master: str) -> None:
    check = f"{__name__}.is_nightly"
    assert check_cluster(parse_address(master, conn_id="nightly", check=check)).is_up
    assert check_cluster(parse_address(master, conn_id="daily", check=check)) == ClusterHealth(
        False, f"{check} says that it is down"
    )


def test_a_function_that_raises_says_no_and_nothing_of_its_secrets() -> None:
    check = f"{__name__}.is_broken"
    assert check_cluster(parse_address("local", check=check)) == ClusterHealth(False, f"{check} raised ConnectionError")


@pytest.mark.parametrize(
    ("check", "problem"),
    [
        ("no_such_module.is_up", "cannot be imported"),
        ("json.no_such_function", "cannot be imported"),
        ("", "cannot be imported"),
        (f"{__name__}.not_a_function", "is not a function"),
        (f"{__name__}.says_nothing", "returned NoneType; return True or False"),
    ],
)
def test_a_wrong_function_is_refused(check: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^cluster check: .*{problem}"):
        check_cluster(parse_address("local", check=check))


calls: list[str] = []
may_return = threading.Event()


def hangs(conn_id: str) -> bool:
    calls.append(conn_id)
    return may_return.wait(20)


def test_a_function_that_hangs_costs_one_thread_and_blocks_no_caller() -> None:
    calls.clear()
    may_return.clear()
    address = parse_address("local", conn_id="slow", check=f"{__name__}.hangs")
    assert [check_cluster(address, timeout=timedelta(seconds=0.05)).is_up for _ in range(5)] == [False] * 5
    wait_for(lambda: calls == ["slow"], what="the function is asked once", seconds=20)
    with ThreadPoolExecutor(8) as askers:
        answers = [askers.submit(check_cluster, address, timeout=timedelta(seconds=20)) for _ in range(8)]
        may_return.set()
        assert all(answer.result(20).is_up for answer in answers)
    assert check_cluster(address, timeout=PATIENCE).is_up, "the next one is a fresh check"
