"""Check whether a Spark cluster can take a job, so that an outage costs no attempt."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from airflow_delay_provider.domain.arguments import load_function
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.cluster.address import ClusterAddress, ClusterKind

#: The state of a large cluster is about a megabyte.
MAX_RESPONSE_BYTES = 16 * 1024 * 1024
#: No driver has this id; a standby master refuses to look it up.
_STATUS_OF_NO_DRIVER = "/v1/submissions/status/no-such-driver"


@dataclass(frozen=True, slots=True)
class ClusterHealth:
    """Whether a cluster can take a job, and the reason in one line."""

    is_up: bool
    reason: str


class StateUnknownError(Exception):
    """A server did not return its state; ``health`` is what follows from that alone."""

    def __init__(self, *, is_up: bool, reason: str) -> None:
        super().__init__(reason)
        self.health = ClusterHealth(is_up, reason)


#: Checks under way: callers that ask meanwhile wait for the same result, so a check that hangs costs one thread.
_checks: dict[ClusterAddress, Future[ClusterHealth]] = {}
_checks_lock = threading.Lock()


def check_cluster(address: ClusterAddress, *, timeout: timedelta = timedelta(seconds=10)) -> ClusterHealth:
    """Check the cluster; block for ``timeout`` at most, even if a name server or the user's check hangs.

    A cluster that cannot be reached is a result, not an error; only a wrong configuration raises.
    """
    with _checks_lock:
        check = _checks.get(address)
        if check is None:
            check = _checks[address] = Future()
            # A little less for the servers: "the master did not answer" says more than "time is up".
            work = (check, address, timeout.total_seconds() * 0.9)
            threading.Thread(target=_run_check, args=work, name="spark-health-check", daemon=True).start()
    try:
        return check.result(timeout.total_seconds())
    except TimeoutError:
        return ClusterHealth(False, f"{address.name} did not respond within {timeout.total_seconds():g} s")


def _run_check(check: Future[ClusterHealth], address: ClusterAddress, seconds: float) -> None:
    try:
        if address.check is None:
            health = _check_servers(address, seconds)
        else:
            health = _call_user_check(address.check, address.conn_id)
    except Exception as error:  # noqa: BLE001 - raised to the callers of check_cluster
        _remove(address)
        check.set_exception(error)
    else:
        _remove(address)
        check.set_result(health)


def _remove(address: ClusterAddress) -> None:
    with _checks_lock:
        del _checks[address]


def _call_user_check(path: str, conn_id: str) -> ClusterHealth:
    check = load_function("cluster check", path, example="my_company.spark.is_up")
    try:
        is_up = check(conn_id)
    except Exception as error:  # noqa: BLE001 - a check may say no by raising
        return ClusterHealth(False, f"{path} raised {type(error).__name__}")
    if not isinstance(is_up, bool):
        raise ConfigurationError(f"cluster check: {path!r} returned {type(is_up).__name__}; return True or False")
    return ClusterHealth(is_up, f"{path} says that it is {'up' if is_up else 'down'}")


# -- one check for each kind of cluster ----------------------------------------------------------------------------


def _check_servers(address: ClusterAddress, seconds: float) -> ClusterHealth:
    if address.kind is ClusterKind.STANDALONE:
        return _check_standalone(address, seconds)
    if address.kind is ClusterKind.YARN:
        return _check_yarn(address, seconds)
    if address.kind is ClusterKind.KUBERNETES:
        return _any_up(address.web_urls, _check_api_server, seconds)
    return ClusterHealth(True, "Spark runs where the task runs")


def _check_standalone(address: ClusterAddress, seconds: float) -> ClusterHealth:
    """A master that listens is up, unless its web UI or REST server is known and says otherwise."""
    listening = _any_up(address.masters, _connect, seconds / 2)
    if listening.is_up and address.web_urls:
        return _any_up(address.web_urls, _check_master, seconds / 2)
    if listening.is_up and address.rest_urls:
        return _any_up(address.rest_urls, _check_rest_server, seconds / 2)
    return listening


def _check_yarn(address: ClusterAddress, seconds: float) -> ClusterHealth:
    if not address.web_urls:
        return ClusterHealth(True, "not checked: the connection's extra has no yarn_resourcemanager_webapp_address")
    return _any_up(address.web_urls, _check_resource_manager, seconds)


def _any_up(servers: Sequence[str], check: Callable[[str, float], ClusterHealth], seconds: float) -> ClusterHealth:
    """Return the first that is up, else why each is not; one that hangs leaves time for the others."""
    reasons = []
    for server in servers:
        try:
            health = check(server, seconds / len(servers))
        except StateUnknownError as error:
            health = error.health
        if health.is_up:
            return health
        reasons.append(health.reason)
    return ClusterHealth(False, "; ".join(reasons))


def _check_master(url: str, seconds: float) -> ClusterHealth:
    state = _get_json(url, "/json/", seconds)
    status, workers = state.get("status"), state.get("aliveworkers")
    if status != "ALIVE":
        return ClusterHealth(False, f"the master of {url} is {status}")
    if workers == 0:
        return ClusterHealth(False, f"the master of {url} is ALIVE, but no worker is alive")
    return ClusterHealth(True, f"the master of {url} is ALIVE with {workers} workers")


def _check_rest_server(url: str, seconds: float) -> ClusterHealth:
    state = _get_json(url, _STATUS_OF_NO_DRIVER, seconds)
    refused = re.search(r"not alive: (\w+)", str(state.get("message")))
    return ClusterHealth(not refused, f"the master of {url} is {refused[1] if refused else 'ALIVE'}")


def _check_resource_manager(url: str, seconds: float) -> ClusterHealth:
    info = _get_json(url, "/ws/v1/cluster/info", seconds / 2).get("clusterInfo") or {}
    state, role = info.get("state"), info.get("haState")
    if (state, role) != ("STARTED", "ACTIVE"):
        return ClusterHealth(False, f"the ResourceManager of {url} is {state}, {role}")
    with suppress(StateUnknownError):
        metrics = _get_json(url, "/ws/v1/cluster/metrics", seconds / 2).get("clusterMetrics") or {}
        if metrics.get("activeNodes") == 0:
            return ClusterHealth(False, f"the ResourceManager of {url} is ACTIVE, but no node is")
    return ClusterHealth(True, f"the ResourceManager of {url} is ACTIVE")


def _check_api_server(url: str, seconds: float) -> ClusterHealth:
    _get(url, "/readyz", seconds)
    return ClusterHealth(True, f"the API server {url} is ready")


# -- one request to one server, with a time limit ------------------------------------------------------------------


def _connect(host_port: str, seconds: float) -> ClusterHealth:
    host, _, port = host_port.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except OSError as error:
        raise _unreachable(host_port, error) from error
    return ClusterHealth(True, f"{host_port} accepts connections")


def _get(url: str, path: str, seconds: float) -> bytes:
    """Return the body of a GET response.

    A server that responds but does not let us read (we send no credentials, its certificate is of a private authority)
    counts as up: the next submission will show. Redirects are not followed: they lead to a login page or to another
    cluster.
    """
    try:
        status, body = _request(url + path, seconds)
    except ssl.SSLCertVerificationError as error:
        raise StateUnknownError(
            is_up=True, reason=f"{url} answers, with a certificate that is not trusted here"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(url, error) from error
    if status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
        raise StateUnknownError(is_up=True, reason=f"{url} answers, but does not show us its state ({status})")
    if status != http.HTTPStatus.OK:
        raise StateUnknownError(is_up=False, reason=f"{url}{path} answers {status}")
    return body


def _get_json(url: str, path: str, seconds: float) -> dict[str, Any]:
    """Return the JSON object of a response; a server that sends something else is not the right one."""
    body = _get(url, path, seconds)
    try:
        state = json.loads(body)
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise StateUnknownError(is_up=False, reason=f"{url}{path} does not answer with a state; is it the right URL?")
    return state


def _request(url: str, seconds: float) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connection_class(parts.netloc, timeout=seconds)
    try:
        connection.request("GET", parts.path, headers={"Accept": "application/json"})
        response = connection.getresponse()
        return response.status, response.read(MAX_RESPONSE_BYTES)
    finally:
        connection.close()


def _unreachable(server: str, error: Exception) -> StateUnknownError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return StateUnknownError(is_up=False, reason=f"{server} cannot be reached: {reason}")
