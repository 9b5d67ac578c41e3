"""Hand Airflow connections of a task to its Spark job: in the environment of spark-submit, where the driver runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID, require_undefined
from airflow_delay_provider.hooks.ledger import open_configured_ledger
from airflow_delay_provider.spark.connection import LEDGER_URL

if TYPE_CHECKING:
    from airflow.sdk import Connection

#: The default connection, where it is not defined.
_EMBEDDED = '{"conn_type": "delay"}'
CLUSTER_MODE = "cluster"
#: Shorter ones occur in ordinary words; Airflow does not mask them either.
MIN_SECRET_LENGTH = 5
_SECRET_NAME = re.compile(r"pass|secret|token|key|credential|authorization", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:([^@\s]+)@")


@dataclass(frozen=True, kw_only=True)
class JobEnvironment:
    """Environment variables for a job, and the secrets in them, which must not appear in its output."""

    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: In all forms in which a job may print them, the longest first.
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def hide_secrets(self, line: str) -> str:
        """Return a line of the job's output without the secrets."""
        for secret in self.secrets:
            line = line.replace(secret, "***")
        return line


def check_job_connections(conn_ids: Any, *, deploy_mode: str | None) -> tuple[str, ...]:
    """Return the ids, if the driver of a job can get these connections."""
    if not isinstance(conn_ids, list | tuple) or not all(isinstance(each, str) and each for each in conn_ids):
        raise ConfigurationError(
            f"job_connections: {conn_ids!r} is not a list of connection ids; use job_connections=[{DEFAULT_CONN_ID!r}]"
        )
    if conn_ids and deploy_mode == CLUSTER_MODE:
        raise ConfigurationError(
            "job_connections: the driver of a job in deploy mode cluster runs on another machine, and Spark would pass"
            " environment variables to it in plain text; write the connections to a file with `airflow connections"
            " export --file-format json FILE`, add files=FILE to the task, and pass its name to the job"
            " (--connection-file, or the option connectionFile of the data source)"
        )
    return tuple(conn_ids)


def find_job_environment(conn_ids: Iterable[str]) -> JobEnvironment:
    """Look up connections, and the ledger if one of them needs it, so that the job needs nothing else of Airflow."""
    from airflow.sdk.configuration import conf

    variables: dict[str, str] = {}
    secrets: set[str] = set()
    url = conf.get("delay", "ledger_url", fallback="")
    for conn_id in conn_ids:
        connection = _find(conn_id)
        variables[f"AIRFLOW_CONN_{conn_id.upper()}"] = _EMBEDDED if connection is None else connection.as_json()
        secrets.update(() if connection is None else _secrets_of(connection))
        if not url and _needs_ledger(connection):
            url = open_configured_ledger().url.render_as_string(hide_password=False)
    if url:
        variables[LEDGER_URL] = url
        secrets.update(_passwords_in(url))
    return JobEnvironment(variables=variables, secrets=_printed_forms(secrets))


def _needs_ledger(connection: Connection | None) -> bool:
    """Tell whether a connection uses the configured ledger."""
    if connection is None:
        return True
    settings = connection.extra_dejson
    is_embedded = connection.conn_type == "delay" and not connection.host
    return not settings.get("ledger_url") and (is_embedded or settings.get("hold") == "ledger")


def _find(conn_id: str) -> Connection | None:
    """Return a connection; None is the default connection, which need not be defined."""
    from airflow.sdk import BaseHook
    from airflow.sdk.exceptions import AirflowNotFoundException

    try:
        return BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        if conn_id == DEFAULT_CONN_ID:
            require_undefined(conn_id)
            return None
        raise ConfigurationError(
            f"job_connections: connection {conn_id!r} is not defined; create it with `airflow connections add"
            f" {conn_id} ...`, or correct the id"
        ) from None


def _printed_forms(secrets: Iterable[str]) -> tuple[str, ...]:
    """Return secrets as they are, as parts of JSON and of URLs, and line by line, as output is read."""
    forms = {
        form
        for secret in secrets
        for form in (secret, json.dumps(secret)[1:-1], quote(secret, safe=""), quote(secret), *secret.splitlines())
        if len(form) >= MIN_SECRET_LENGTH
    }
    return tuple(sorted(forms, key=len, reverse=True))


def _secrets_of(connection: Connection) -> Iterator[str]:
    yield connection.as_json()
    if connection.password:
        yield connection.password
    yield from _secrets_in(connection.extra_dejson)


def _secrets_in(settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _secrets_in(value)
        elif isinstance(value, str):
            if _SECRET_NAME.search(name):
                yield value
            yield from _passwords_in(value)


def _passwords_in(text: str) -> Iterator[str]:
    """Return the passwords of URLs."""
    yield from _URL_PASSWORD.findall(text)
