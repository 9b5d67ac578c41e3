"""Open the broker of an Airflow connection."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from airflow_delay_provider.connection_forms import CONNECTION_TYPES
from airflow_delay_provider.domain.arguments import Hold, Limits, parse_choice
from airflow_delay_provider.domain.exceptions import ConfigurationError, InvalidMessageError
from airflow_delay_provider.hooks.ledger import open_configured_ledger

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from airflow_delay_provider.brokers.ledger.database import Ledger
    from airflow_delay_provider.brokers.port import Broker
    from airflow_delay_provider.domain.clock import Clock

#: Works without being defined: it uses the ledger of ``[delay] ledger_url``.
DEFAULT_CONN_ID = "delay_default"
#: The settings in the extra of each type of connection.
_SETTINGS = {each["connection-type"]: frozenset(each["conn-fields"]) for each in CONNECTION_TYPES}
#: Selects where Airflow looks for connections.
_CONTEXT_VARIABLE = "_AIRFLOW_PROCESS_CONTEXT"


def require_undefined(conn_id: str) -> None:
    """Raise unless Airflow knows for certain that the connection does not exist.

    Airflow also reports "not defined" if its API does not answer. Falling back to the built-in default would then
    store messages in a ledger that no dispatcher serves.
    """
    from airflow.sdk.execution_time import task_runner

    supervisor = getattr(task_runner, "SUPERVISOR_COMMS", None)
    known = _supervisor_knows(supervisor, conn_id) if supervisor is not None else _database_is_up()
    if not known:
        raise ConfigurationError(
            f"delay_conn_id: Airflow could not look up connection {conn_id!r}; try again when its API and database are"
            f" up, or set AIRFLOW_CONN_{conn_id.upper()} in the environment"
        )


@contextmanager
def connections_of_the_server() -> Iterator[None]:
    """Look up connections in Airflow's database too, as ``airflow connections`` does, not only in the environment.

    Threads may use it at the same time without blocking each other. The setting belongs to the process, so the first
    thread switches it on and the last one switches it off.
    """
    _SWITCH.enter()
    try:
        yield
    finally:
        _SWITCH.leave()


class _Switch:
    """Airflow's environment variable, set while at least one thread needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: str | None = None

    def enter(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = os.environ.get(_CONTEXT_VARIABLE)
                os.environ[_CONTEXT_VARIABLE] = "server"
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if self._before is None:
                del os.environ[_CONTEXT_VARIABLE]
            else:
                os.environ[_CONTEXT_VARIABLE] = self._before


_SWITCH = _Switch()


def _supervisor_knows(supervisor: Any, conn_id: str) -> bool:
    from airflow.sdk.exceptions import ErrorType
    from airflow.sdk.execution_time.comms import ErrorResponse, GetConnection

    response = supervisor.send(GetConnection(conn_id=conn_id))
    return isinstance(response, ErrorResponse) and response.error is ErrorType.CONNECTION_NOT_FOUND


def _database_is_up() -> bool:
    from airflow import settings
    from sqlalchemy.exc import SQLAlchemyError

    if settings.engine is None:
        return True
    try:
        settings.engine.connect().close()
    except SQLAlchemyError:
        return False
    return True


def open_broker(
    conn_id: str, connection: Connection | None, *, clock: Clock | None = None, hold: Hold | str | None = None
) -> Broker:
    """Open the broker of a connection; None is the built-in default.

    :param hold: what stores messages until they are due; by default the connection's extra decides, and then the broker
        itself. Embedded messages are always stored in the ledger.
    """
    holder = _holder_of(conn_id, connection, hold)
    if _is_embedded(connection):
        if holder is Hold.BROKER:
            raise ConfigurationError(
                f"hold: connection {conn_id!r} (type delay) stores messages in the ledger; use"
                ' hold="ledger", leave hold out, or use the connection of another broker'
            )
        return open_plain_broker(conn_id, connection, clock=clock)
    broker = open_plain_broker(conn_id, connection, clock=clock)
    return _hold_in_ledger(conn_id, connection, broker) if holder is Hold.LEDGER else broker


def open_plain_broker(conn_id: str, connection: Connection | None, *, clock: Clock | None = None) -> Broker:
    """Open the broker of a connection, without the ledger in front of it."""
    if connection is None:
        return _open_embedded(connection, clock)
    _require_known_settings(conn_id, connection)
    try:
        open_it = _BROKERS[connection.conn_type or ""]
    except KeyError:
        raise ConfigurationError(
            f"connection {conn_id!r} has type {connection.conn_type!r}; use one of {', '.join(_BROKERS)}"
        ) from None
    return open_it(connection, clock)


def _require_known_settings(conn_id: str, connection: Connection) -> None:
    """Refuse misspelt names in the extra. Names with a dot, and ``ssl...`` of a ledger, are those of client libraries.

    The extra of other types, such as the official provider's ``kafka``, may have settings for others.
    """
    known = _SETTINGS.get(connection.conn_type or "")
    if known is None:
        return
    for name in _extra_of(connection):
        if name in known or "." in name or (_is_embedded(connection) and name.startswith("ssl")):
            continue
        close = get_close_matches(name, known, n=1)
        remedy = f"did you mean {close[0]!r}?" if close else f"use {', '.join(sorted(known))}"
        raise ConfigurationError(f"connection {conn_id!r}: its extra has an unknown setting {name!r}; {remedy}")


def _holder_of(conn_id: str, connection: Connection | None, hold: Hold | str | None) -> Hold | None:
    """Return what stores messages until they are due; None if neither the caller nor the connection says."""
    if hold is not None:
        return parse_choice("hold", Hold, hold)
    configured = _extra_of(connection).get("hold")
    try:
        return parse_choice("hold", Hold, configured) if configured else None
    except InvalidMessageError as error:
        raise ConfigurationError(f"{error} in the extra of connection {conn_id!r}") from None


def _is_embedded(connection: Connection | None) -> bool:
    return connection is None or connection.conn_type == "delay"


def _hold_in_ledger(conn_id: str, connection: Connection | None, target: Broker) -> Broker:
    from airflow_delay_provider.brokers.ledger.ledger_held import LedgerHeldBroker

    ledger = _open_named_ledger(connection)
    return LedgerHeldBroker(ledger, conn_id, target, limits=target.limits, clock=target.clock)


def _open_embedded(connection: Connection | None, clock: Clock | None) -> Broker:
    from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker

    limits = Limits.from_settings(_extra_of(connection))
    return EmbeddedBroker(_open_ledger(connection), limits=limits, clock=clock)


def _open_ledger(connection: Connection | None) -> Ledger:
    """Open the ledger of a connection of type ``delay``: at its PostgreSQL host, or else the configured ledger."""
    from sqlalchemy.engine import URL

    from airflow_delay_provider.brokers.ledger.database import Ledger

    if connection is None or not connection.host:
        return _open_named_ledger(connection)
    return Ledger(
        URL.create(
            "postgresql+psycopg",
            username=connection.login or None,
            password=connection.password or None,
            host=connection.host,
            port=connection.port,
            database=connection.schema or None,
            query={name: str(value) for name, value in _extra_of(connection).items() if name.startswith("ssl")},
        )
    )


def _open_named_ledger(connection: Connection | None) -> Ledger:
    """Open the ledger that the extra of a connection names, or else the configured ledger."""
    from airflow_delay_provider.brokers.ledger.database import Ledger

    url = _extra_of(connection).get("ledger_url")
    return Ledger(url) if url else open_configured_ledger()


def _extra_of(connection: Connection | None) -> Mapping[str, Any]:
    """Return the extra of a connection; empty without a connection."""
    return connection.extra_dejson if connection is not None else {}


def _open_rabbitmq(connection: Connection, clock: Clock | None) -> Broker:
    with _needing("rabbitmq", connection):
        from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
        from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig
    settings = _extra_of(connection)
    config = RabbitMQConfig.from_settings(
        settings,
        host=connection.host,
        port=connection.port,
        vhost=connection.schema,
        login=connection.login,
        password=connection.password,
    )
    return RabbitMQBroker(config, limits=Limits.from_settings(settings), clock=clock)


def _open_kafka(connection: Connection, clock: Clock | None) -> Broker:
    with _needing("kafka", connection):
        from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
        from airflow_delay_provider.brokers.kafka.config import KafkaConfig
    settings = _extra_of(connection)
    config = KafkaConfig.from_settings(
        settings,
        host=connection.host,
        port=connection.port,
        login=connection.login,
        password=connection.password,
    )
    return KafkaBroker(config, limits=Limits.from_settings(settings), clock=clock)


@contextmanager
def _needing(extra: str, connection: Connection) -> Iterator[None]:
    """Name the extra of this package that installs the missing client library."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"connections of type {connection.conn_type} need {error.name}; install airflow-delay-provider[{extra}]"
        ) from error


_BROKERS: dict[str, Callable[[Connection, Clock | None], Broker]] = {
    "delay": _open_embedded,
    "rabbitmq": _open_rabbitmq,
    "delay_kafka": _open_kafka,
    # The type of Airflow's own Kafka provider, whose extra holds settings of the client library.
    "kafka": _open_kafka,
}
