"""From an Airflow connection of the Spark provider to the cluster that it means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook

from airflow_delay_provider.exceptions import ConfigurationError
from airflow_delay_provider.spark.probes.address import ClusterAddress, Hints, parse_address

if TYPE_CHECKING:
    from airflow.sdk import Connection


def find_cluster(conn_id: str, *, check: str | None = None) -> ClusterAddress:
    """Return the cluster of a connection; as for the Spark provider, one that is not defined means YARN."""
    from airflow.sdk.exceptions import AirflowNotFoundException

    try:
        return cluster_of(BaseHook.get_connection(conn_id), check=check)
    except AirflowNotFoundException:
        return parse_address("yarn", conn_id=conn_id, check=check)


def cluster_of(connection: Connection, *, check: str | None = None) -> ClusterAddress:
    """Return the cluster that ``SparkSubmitHook`` would submit to.

    The hook itself is not asked: it writes the keytab of the connection to a file, and needs a Kubernetes client.

    Its extra says what else can be asked: ``yarn_resourcemanager_webapp_address``, and ``master-ui-port`` and
    ``rest-port`` of a standalone master, which are not guessed, as neither need be open.

    :param check: dotted path of a function that gets the connection's id and says whether its cluster is up.
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
        raise ConfigurationError(f"{field}: {given!r} is not a number; give that of a port of the master") from None
