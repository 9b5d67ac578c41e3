"""What a cluster is called, and where it can be asked whether it is up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from urllib.parse import SplitResult, urlsplit

from airflow_delay_provider.exceptions import ConfigurationError


class ClusterKind(StrEnum):
    """Who gives a job its resources."""

    STANDALONE = "standalone"
    YARN = "yarn"
    KUBERNETES = "kubernetes"
    LOCAL = "local"
    #: A master of another kind, for which the user brings the check.
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterAddress:
    """One cluster; there is no user name and no password in it."""

    kind: ClusterKind
    #: The same for all who use the cluster, such as ``spark://10.0.0.1:7077``: key of what their tasks share.
    name: str
    #: ``host:port`` of each standalone master, where applications register.
    masters: tuple[str, ...] = ()
    #: Base URLs of the REST servers of standalone masters.
    rest_urls: tuple[str, ...] = ()
    #: Base URLs of what tells the state: pages of standalone masters, ResourceManagers, the Kubernetes API.
    web_urls: tuple[str, ...] = ()
    #: Dotted path of a function of the user that is asked instead; it gets ``conn_id``.
    check: str | None = None
    conn_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """What a connection tells beyond the master."""

    #: Of the pages of standalone masters.
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
            f"host: a master such as {_without_user(master)!r} cannot be asked whether it is up; give the dotted path"
            " of a function that can say it"
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
    # Where Hadoop's configuration alone knows the cluster, two connections may mean two clusters.
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
    """Return host and port without the user, who is nobody's business here."""
    host = parts.hostname or ""
    port = _port_of(parts)
    return (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")


def _port_of(parts: SplitResult) -> int | None:
    """Return the port, 0 for what is none."""
    try:
        return parts.port
    except ValueError:
        return 0


def _without_user(text: str) -> str:
    scheme, separator, rest = text.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
