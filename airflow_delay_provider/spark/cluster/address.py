"""The address of a Spark cluster, from its master URL or an Airflow connection of the Spark provider."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from airflow_delay_provider.domain.exceptions import ConfigurationError

if TYPE_CHECKING:
    from airflow.sdk import Connection


class ClusterKind(StrEnum):
    """The resource manager of a cluster."""

    STANDALONE = "standalone"
    YARN = "yarn"
    KUBERNETES = "kubernetes"
    LOCAL = "local"
    #: A master of another kind, for which the user provides the check.
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterAddress:
    """One cluster, without user names and passwords."""

    kind: ClusterKind
    #: The same for all users of the cluster, such as ``spark://10.0.0.1:7077``: the key of its shared circuit.
    name: str
    #: ``host:port`` of each standalone master, where applications register.
    masters: tuple[str, ...] = ()
    #: Base URLs of the REST servers of standalone masters.
    rest_urls: tuple[str, ...] = ()
    #: Base URLs of the web UIs of standalone masters, of ResourceManagers, or of the Kubernetes API.
    web_urls: tuple[str, ...] = ()
    #: Dotted path of the user's own check, which replaces ours; it gets ``conn_id``.
    check: str | None = None
    conn_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """Settings of a connection beyond the master."""

    #: Of the web UIs of standalone masters.
    master_ui_port: int | None = None
    rest_scheme: str = "http"
    rest_port: int | None = None
    #: One or more, separated by commas.
    yarn_resourcemanager_webapp_address: str = ""


def parse_address(
    master: str, *, conn_id: str = "", hints: Hints | None = None, check: str | None = None
) -> ClusterAddress:
    """Return the address of a master as ``spark-submit --master`` takes it."""
    kind = _kind_of(master)
    hints = hints or Hints()
    if kind is ClusterKind.STANDALONE:
        address = _standalone(master, hints)
    elif kind is ClusterKind.YARN:
        address = _yarn(conn_id, hints)
    elif kind is ClusterKind.KUBERNETES:
        server = _base_url("host", master.removeprefix("k8s://"), "https")
        address = ClusterAddress(kind=kind, name=f"k8s://{server}", web_urls=(server,))
    elif kind is ClusterKind.LOCAL:
        address = ClusterAddress(kind=kind, name="local")
    elif check is not None:
        address = ClusterAddress(kind=kind, name=_without_user(master))
    else:
        raise ConfigurationError(
            f"host: there is no health check for a master such as {_without_user(master)!r}; give the dotted"
            " path of your own as cluster_check"
        )
    return replace(address, check=check, conn_id=conn_id)


def _standalone(master: str, hints: Hints) -> ClusterAddress:
    masters = tuple(sorted(_parse_masters(master)))
    return ClusterAddress(
        kind=ClusterKind.STANDALONE,
        name=f"spark://{','.join(masters)}",
        masters=masters,
        rest_urls=tuple(_urls_of("rest-scheme, rest-port", masters, hints.rest_scheme, hints.rest_port)),
        web_urls=tuple(_urls_of("master-ui-port", masters, "http", hints.master_ui_port)),
    )


def _yarn(conn_id: str, hints: Hints) -> ClusterAddress:
    field = "yarn_resourcemanager_webapp_address"
    given = [each.strip() for each in hints.yarn_resourcemanager_webapp_address.split(",") if each.strip()]
    managers = tuple(sorted(_base_url(field, each, "http") for each in given))
    # If only Hadoop's configuration knows the cluster, two connections may mean two clusters.
    name = f"yarn:{','.join(managers) or conn_id}"
    return ClusterAddress(kind=ClusterKind.YARN, name=name, web_urls=managers)


def _kind_of(master: str) -> ClusterKind:
    if master.startswith("spark://"):
        return ClusterKind.STANDALONE
    if master.startswith("k8s://"):
        return ClusterKind.KUBERNETES
    if re.match(r"yarn\b", master):
        return ClusterKind.YARN
    if re.match(r"local(-cluster)?(\[.*\])?$", master):
        return ClusterKind.LOCAL
    return ClusterKind.OTHER


def _parse_masters(master: str) -> Iterator[str]:
    for each in master.removeprefix("spark://").split(","):
        parts = urlsplit(f"spark://{each.strip()}")
        if not parts.hostname or not _port_of(parts):
            raise ConfigurationError(
                f"host: {_without_user(each.strip())!r} is not the address of a master; give host:port for each, such"
                " as 'spark://10.0.0.1:7077,10.0.0.2:7077'"
            )
        yield _location(parts)


def _urls_of(field: str, masters: tuple[str, ...], scheme: str, port: int | None) -> Iterator[str]:
    if port is not None:
        for master in masters:
            yield _base_url(field, f"{scheme}://{master.rpartition(':')[0]}:{port}", "http")


def _base_url(field: str, text: str, scheme: str) -> str:
    parts = urlsplit(text if "://" in text else f"{scheme}://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname or _port_of(parts) == 0:
        raise ConfigurationError(
            f"{field}: {_without_user(text)!r} is not the URL of a server; give one such as '{scheme}://10.0.0.1:8080'"
        )
    return f"{parts.scheme}://{_location(parts)}{parts.path.rstrip('/')}"


def _location(parts: SplitResult) -> str:
    """Return host and port without user and password."""
    host = parts.hostname or ""
    port = _port_of(parts)
    return (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")


def _port_of(parts: SplitResult) -> int | None:
    """Return the port, 0 for an invalid one."""
    try:
        return parts.port
    except ValueError:
        return 0


def _without_user(text: str) -> str:
    scheme, separator, rest = text.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


# -- from an Airflow connection ------------------------------------------------------------------------------------


def find_cluster(conn_id: str, *, check: str | None = None) -> ClusterAddress:
    """Return the cluster of a connection; an undefined one means YARN, as for the Spark provider."""
    from airflow.sdk import BaseHook
    from airflow.sdk.exceptions import AirflowNotFoundException

    try:
        return cluster_of(BaseHook.get_connection(conn_id), check=check)
    except AirflowNotFoundException:
        return parse_address("yarn", conn_id=conn_id, check=check)


def cluster_of(connection: Connection, *, check: str | None = None) -> ClusterAddress:
    """Return the cluster that ``SparkSubmitHook`` would submit to.

    The hook itself is not used: it writes the keytab of the connection to a file, and needs a Kubernetes client.

    The extra names further servers for health checks: ``yarn_resourcemanager_webapp_address``, and ``master-ui-port``
    and ``rest-port`` of a standalone master. Those ports are never guessed, because they may be closed.

    :param check: dotted path of a function that gets the connection's id and returns whether its cluster is up.
    """
    extra = connection.extra_dejson
    hints = Hints(
        master_ui_port=_parse_port(extra, "master-ui-port"),
        rest_scheme=extra.get("rest-scheme") or "http",
        rest_port=_parse_port(extra, "rest-port"),
        yarn_resourcemanager_webapp_address=extra.get("yarn_resourcemanager_webapp_address") or "",
    )
    return parse_address(master_of(connection), conn_id=connection.conn_id, hints=hints, check=check)


def master_of(connection: Connection) -> str:
    """Return the master as the Spark provider reads it: the form has all in ``host``, a URI has the scheme as type."""
    host = connection.host or ""
    is_whole = connection.conn_type == "spark" and host and ("://" in host or not connection.port)
    master = host if is_whole else f"{connection.conn_type}://{host}"
    return f"{master}:{connection.port}" if connection.port else master


def _parse_port(extra: Mapping[str, Any], field: str) -> int | None:
    given = extra.get(field)
    if given is None or given == "":
        return None
    try:
        return int(str(given))
    except ValueError:
        raise ConfigurationError(f"{field}: {given!r} is not a number; give a port of the master") from None
