"""The Airflow connection of a Spark job: looked up on the driver, opened there and on executors.

Executors have neither Airflow's connections nor its settings. They get the connection inside the pickled reader or
writer, which Spark sends to them and shows nowhere: not in the plan, the event log, the UI or a log line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from airflow_delay_provider.domain.arguments import Hold, parse_choice
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID, open_broker

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from airflow_delay_provider.brokers.ledger.database import Ledger
    from airflow_delay_provider.brokers.port import Broker

_EMBEDDED = "delay"
LEDGER_URL = "AIRFLOW__DELAY__LEDGER_URL"
#: What Airflow sets in the environment of each task.
_DATABASE, _NOT_ALLOWED = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "airflow-db-not-allowed"


@dataclass(frozen=True, kw_only=True)
class JobConnection:
    """What an Airflow connection says, with the URL of the ledger that it needs, so that any process can open it."""

    conn_id: str
    conn_type: str
    host: str | None = None
    port: int | None = None
    schema: str | None = None
    login: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    extra_dejson: Mapping[str, Any] = field(default_factory=dict, repr=False)
    #: ``broker`` or ``ledger``: what stores messages until they are due; None is what the connection says.
    hold: str | None = None
    #: The SQLite file of the ledger, which only processes of the driver's machine can use; None is another ledger.
    ledger_file: str | None = None

    @property
    def holds_in_ledger(self) -> bool:
        """Whether a ledger stores its messages until they are due."""
        return self.conn_type == _EMBEDDED or (self.hold or self.extra_dejson.get("hold")) == Hold.LEDGER

    def open(self) -> Broker:
        """Open its broker; Airflow is not imported."""
        if self.ledger_file is not None and not Path(self.ledger_file).exists():
            raise ConfigurationError(
                f"connection: the ledger of {self.conn_id!r} is the SQLite file {self.ledger_file} on the driver's"
                " machine, and this executor runs on another one; put the ledger on PostgreSQL ([delay] ledger_url),"
                " or run the job with a local master"
            )
        return open_broker(self.conn_id, cast("Connection", self), hold=self.hold)


def find_job_connection(
    conn_id: str | None = None, *, hold: str | None = None, connection_file: str | None = None
) -> JobConnection:
    """Return a connection from a file, or from where Airflow looks: the environment and its secrets backends.

    :param connection_file: a file as ``airflow connections export --file-format json`` writes it; also the name of one
        that was given to spark-submit with ``--files``.
    """
    name = conn_id or DEFAULT_CONN_ID
    if hold is not None:
        hold = parse_choice("hold", Hold, hold).value
    found = _read_file(connection_file, name) if connection_file else _look_up(name)
    return _with_ledger(replace(found, hold=hold))


@dataclass(frozen=True, kw_only=True)
class ListedMessages:
    """Where the messages of a connection are listed: a ledger, and what selects them in it."""

    ledger: JobConnection
    #: None selects all messages of the ledger.
    destination: str | None


def find_listed_messages(connection: JobConnection) -> ListedMessages:
    """Return where the messages of a connection are listed, as ``DelayHook.get_listed_destination`` selects them.

    Those of a broker that holds messages itself are in the ledger to which a dispatcher copies its journal: the one
    that its extra names with ``ledger_url``, else the configured one.
    """
    if connection.conn_type == _EMBEDDED:
        return ListedMessages(ledger=connection, destination=None)
    found = _open_ledger(connection.extra_dejson.get("ledger_url"), for_messages=False)
    ledger = _of_ledger(JobConnection(conn_id=connection.conn_id, conn_type=_EMBEDDED), found)
    return ListedMessages(ledger=ledger, destination=connection.conn_id)


def _look_up(conn_id: str) -> JobConnection:
    if (given := os.environ.get(f"AIRFLOW_CONN_{conn_id.upper()}", "").strip()).startswith("{"):
        # So a job that gets its connection from a task needs no Airflow, whose import takes seconds.
        return _parse(given, conn_id, where=f"AIRFLOW_CONN_{conn_id.upper()}")
    if is_in_task := os.environ.get(_DATABASE, "").startswith(_NOT_ALLOWED):
        # Inherited from the task that has started this job. With it, Airflow cannot be imported.
        os.environ[_DATABASE] = "sqlite://"
    from airflow_delay_provider.hooks.delay import DelayHook

    try:
        connection = DelayHook(conn_id)._find_connection()
    except ConfigurationError:
        if not is_in_task:
            raise
        raise ConfigurationError(
            f"connection: {conn_id!r} is not in the environment of this job, and no secrets backend has it; add it to"
            " job_connections of the task"
        ) from None
    if connection is None:
        return JobConnection(conn_id=conn_id, conn_type=_EMBEDDED)
    return JobConnection(
        conn_id=conn_id,
        conn_type=connection.conn_type or "",
        host=connection.host,
        port=connection.port,
        schema=connection.schema,
        login=connection.login,
        password=connection.password,
        extra_dejson=connection.extra_dejson,
    )


def _read_file(file: str, conn_id: str) -> JobConnection:
    path = _find_file(file)
    try:
        connections = json.loads(path.read_text())
    except OSError as error:
        raise ConfigurationError(
            f"connectionFile: {path} cannot be read ({error.strerror}); name a file that the driver can read"
        ) from None
    except ValueError:
        connections = None
    if not isinstance(connections, dict):
        raise ConfigurationError(
            f"connectionFile: {path} is not a JSON object of connections; write it with"
            " `airflow connections export --file-format json FILE`"
        )
    given = connections.get(conn_id)
    if not isinstance(given, dict):
        raise ConfigurationError(f"connectionFile: {path} has no connection {conn_id!r}; export it, too")
    return _parse(json.dumps(given), conn_id, where=f"connectionFile: {path}")


def _parse(text: str, conn_id: str, *, where: str) -> JobConnection:
    """Return a connection from its JSON, as Airflow writes it."""
    try:
        given = json.loads(text)
        extra = given.get("extra") or {}
        settings = json.loads(extra) if isinstance(extra, str) else dict(extra)
        port = int(given["port"]) if given.get("port") not in (None, "") else None
    except (TypeError, ValueError):
        # Without the error's own text, which would quote the connection.
        raise ConfigurationError(f"{where}: port or extra of {conn_id!r} are invalid; correct them") from None
    return JobConnection(
        conn_id=conn_id,
        conn_type=str(given.get("conn_type") or "").replace("-", "_"),
        host=given.get("host") or None,
        port=port,
        schema=given.get("schema") or None,
        login=given.get("login") or None,
        password=given.get("password") or None,
        extra_dejson=settings,
    )


def _find_file(file: str) -> Path:
    path = Path(file)
    if path.exists() or path.is_absolute():
        return path
    from pyspark import SparkFiles

    # Outside of a Spark context there is no such folder.
    distributed = Path(SparkFiles.get(file)) if SparkFiles._root_directory else path
    return distributed if distributed.exists() else path


def _with_ledger(connection: JobConnection) -> JobConnection:
    """Name the ledger, if the connection needs one: executors do not know Airflow's settings."""
    if not connection.holds_in_ledger or (connection.conn_type == _EMBEDDED and connection.host):
        return connection
    url = connection.extra_dejson.get("ledger_url")
    return _of_ledger(connection, _open_ledger(url))


def _of_ledger(connection: JobConnection, ledger: Ledger) -> JobConnection:
    """Name a ledger; a new SQLite file is created here, on the driver, as executors must find it."""
    address = ledger.url
    if not ledger.is_there:
        ledger.migrate()
        ledger.close()
    return replace(
        connection,
        extra_dejson={**connection.extra_dejson, "ledger_url": address.render_as_string(hide_password=False)},
        ledger_file=address.database if address.get_backend_name() == "sqlite" else None,
    )


def _open_ledger(url: str | None, *, for_messages: bool = True) -> Ledger:
    """Return the ledger of a URL, else the configured one; it connects on first use."""
    url = url or os.environ.get(LEDGER_URL)
    if url:
        from airflow_delay_provider.brokers.ledger.database import Ledger

        return Ledger(url)
    from airflow_delay_provider.hooks.ledger import open_configured_ledger

    return open_configured_ledger(for_messages=for_messages)
