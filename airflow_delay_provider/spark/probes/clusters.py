"""What each kind of cluster is asked, and which answers mean that it can take a job."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress

from airflow_delay_provider.spark.probes.address import ClusterAddress, ClusterKind
from airflow_delay_provider.spark.probes.asking import NotToldError, Probe, connect, read, read_json

#: No driver has this id; a master that is not the active one refuses to look for it.
_STATUS_OF_NO_DRIVER = "/v1/submissions/status/driver-of-nobody"


def look_at(address: ClusterAddress, seconds: float) -> Probe:
    """Ask the cluster within about ``seconds``."""
    if address.kind is ClusterKind.STANDALONE:
        return _look_at_standalone(address, seconds)
    if address.kind is ClusterKind.YARN:
        return _look_at_yarn(address, seconds)
    if address.kind is ClusterKind.KUBERNETES:
        return _any_up(address.web_urls, _look_at_api_server, seconds)
    return Probe(True, "Spark runs where the task runs")


def _look_at_standalone(address: ClusterAddress, seconds: float) -> Probe:
    """A master that listens is up, unless it is known where to ask it and it says otherwise."""
    listening = _any_up(address.masters, connect, seconds / 2)
    if listening.is_up and address.web_urls:
        return _any_up(address.web_urls, _look_at_master, seconds / 2)
    if listening.is_up and address.rest_urls:
        return _any_up(address.rest_urls, _look_at_rest_server, seconds / 2)
    return listening


def _look_at_yarn(address: ClusterAddress, seconds: float) -> Probe:
    if not address.web_urls:
        return Probe(True, "nobody to ask: the connection's extra has no yarn_resourcemanager_webapp_address")
    return _any_up(address.web_urls, _look_at_resource_manager, seconds)


def _any_up(places: Sequence[str], look: Callable[[str, float], Probe], seconds: float) -> Probe:
    """Return the first that is up, else why each is not; one that never answers leaves time for the others."""
    reasons = []
    for place in places:
        try:
            probe = look(place, seconds / len(places))
        except NotToldError as error:
            probe = error.probe
        if probe.is_up:
            return probe
        reasons.append(probe.reason)
    return Probe(False, "; ".join(reasons))


def _look_at_master(url: str, seconds: float) -> Probe:
    told = read_json(url, "/json/", seconds)
    status, workers = told.get("status"), told.get("aliveworkers")
    if status != "ALIVE":
        return Probe(False, f"the master of {url} is {status}")
    if workers == 0:
        return Probe(False, f"the master of {url} is ALIVE, but no worker is alive")
    return Probe(True, f"the master of {url} is ALIVE with {workers} workers")


def _look_at_rest_server(url: str, seconds: float) -> Probe:
    told = read_json(url, _STATUS_OF_NO_DRIVER, seconds)
    refused = re.search(r"not alive: (\w+)", str(told.get("message")))
    return Probe(not refused, f"the master of {url} is {refused[1] if refused else 'ALIVE'}")


def _look_at_resource_manager(url: str, seconds: float) -> Probe:
    info = read_json(url, "/ws/v1/cluster/info", seconds / 2).get("clusterInfo") or {}
    state, role = info.get("state"), info.get("haState")
    if (state, role) != ("STARTED", "ACTIVE"):
        return Probe(False, f"the ResourceManager of {url} is {state}, {role}")
    with suppress(NotToldError):
        metrics = read_json(url, "/ws/v1/cluster/metrics", seconds / 2).get("clusterMetrics") or {}
        if metrics.get("activeNodes") == 0:
            return Probe(False, f"the ResourceManager of {url} is ACTIVE, but no node is")
    return Probe(True, f"the ResourceManager of {url} is ACTIVE")


def _look_at_api_server(url: str, seconds: float) -> Probe:
    read(url, "/readyz", seconds)
    return Probe(True, f"the API server {url} is ready")
