"""From an Airflow connection to a broker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow_delay_provider.domain.schedule import Hold, Limits, parse_choice
from airflow_delay_provider.exceptions import ConfigurationError, InvalidMessageError

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from airflow_delay_provider.brokers.base import Broker
    from airflow_delay_provider.domain.clock import Clock
    from airflow_delay_provider.ledger.database import Ledger

#: Works without being defined: the ledger of ``[delay] ledger_url``.
DEFAULT_CONN_ID = "delay_default"
#: Airflow's own switch between the sources of connections.
_CONTEXT_VARIABLE = "_AIRFLOW_PROCESS_CONTEXT"


def open_configured_ledger(*, for_messages: bool = True) -> Ledger:
    """Return the ledger of ``[delay] ledger_url``, by default a SQLite file in Airflow's home.

    That default is refused where it would take messages that no dispatcher ever sees.

    :param for_messages: messages wait in it; otherwise it is only looked at, and a file of one machine does no harm.
    """
    from airflow.sdk.configuration import conf

    from airflow_delay_provider.hooks import one_machine
    from airflow_delay_provider.ledger.database import Ledger
    from airflow_delay_provider.ledger.location import default_ledger_url

    url: str = conf.get("delay", "ledger_url", fallback="")
    if url or not for_messages:
        return Ledger(url or default_ledger_url())
    one_machine.require_local_executors(default_ledger_url())
    ledger = Ledger(default_ledger_url())
    one_machine.require_dispatcher_here(ledger)
    return ledger


def require_undefined(conn_id: str) -> None:
    """Refuse to go on unless Airflow knows that the connection does not exist.

    Airflow says "not defined" also when it could not be asked. Taking the built-in default then would store messages in
    a ledger that nobody dispatches from.
    """
    from airflow.sdk.execution_time import task_runner

    supervisor = getattr(task_runner, "SUPERVISOR_COMMS", None)
    known = _supervisor_answers(supervisor, conn_id) if supervisor is not None else _database_answers()
    if not known:
        raise ConfigurationError(
            f"delay_conn_id: Airflow could not say whether connection {conn_id!r} is defined; try again when its API"
            f" and database run, or define AIRFLOW_CONN_{conn_id.upper()} in the environment"
        )


@contextmanager
def connections_of_the_server() -> Iterator[None]:
    """Find connections in Airflow's database too, as ``airflow connections`` does; else only the environment counts.

    Any number of threads may look at the same time, and one that hangs holds up no other: the switch is the process's,
    so the first one in turns it on and the last one out turns it off.
    """
    _SWITCH.enter()
    try:
        yield
    finally:
        _SWITCH.leave()


class _Switch:
    """Airflow's variable, turned on while anybody needs it."""

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


def _supervisor_answers(supervisor: Any, conn_id: str) -> bool:
    from airflow.sdk.exceptions import ErrorType
    from airflow.sdk.execution_time.comms import ErrorResponse, GetConnection

    answer = supervisor.send(GetConnection(conn_id=conn_id))
    return isinstance(answer, ErrorResponse) and answer.error is ErrorType.CONNECTION_NOT_FOUND


def _database_answers() -> bool:
    from airflow import settings
    from sqlalchemy.exc import SQLAlchemyError

    if settings.engine is None:
        return True
    try:
        settings.engine.connect().close()
    except SQLAlchemyError:
        return False
    return True


def open_ledger(connection: Connection | None) -> Ledger:
    """Return the ledger of a connection of type ``delay``: its PostgreSQL host, else the configured one."""
    from sqlalchemy.engine import URL

    from airflow_delay_provider.ledger.database import Ledger

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
    from airflow_delay_provider.ledger.database import Ledger

    url = _extra_of(connection).get("ledger_url")
    return Ledger(url) if url else open_configured_ledger()


def open_broker(
    conn_id: str, connection: Connection | None, *, clock: Clock | None = None, hold: Hold | str | None = None
) -> Broker:
    """Return the broker of a connection, by its type and by who holds the wait: ``hold``, else what its extra says.

    No connection is the built-in default. Embedded messages wait in the ledger by nature; for every other broker its
    own delay goes before the ledger.
    """
    holder = _holder_of(conn_id, connection, hold)
    if _is_embedded(connection):
        if holder is Hold.BROKER:
            raise ConfigurationError(
                f"hold: the messages of connection {conn_id!r} (type delay) can only wait in the ledger; use"
                ' hold="ledger" or none, or the connection of another broker'
            )
        return open_plain_broker(conn_id, connection, clock=clock)
    broker = open_plain_broker(conn_id, connection, clock=clock)
    return _hold_in_ledger(conn_id, connection, broker) if holder is Hold.LEDGER else broker


def open_plain_broker(conn_id: str, connection: Connection | None, *, clock: Clock | None = None) -> Broker:
    """Return the broker of a connection as it is, whoever holds the wait."""
    if connection is None:
        return _open_embedded(connection, clock)
    try:
        open_it = _BROKERS[connection.conn_type or ""]
    except KeyError:
        raise ConfigurationError(
            f"connection {conn_id!r} has type {connection.conn_type!r}; use one of {', '.join(_BROKERS)}"
        ) from None
    return open_it(connection, clock)


def _holder_of(conn_id: str, connection: Connection | None, hold: Hold | str | None) -> Hold | None:
    """Return who is to hold messages; None is nobody in particular."""
    if hold is not None:
        return parse_choice("hold", Hold, hold)
    said = _extra_of(connection).get("hold")
    try:
        return parse_choice("hold", Hold, said) if said else None
    except InvalidMessageError as error:
        raise ConfigurationError(f"{error} in the extra of connection {conn_id!r}") from None


def _is_embedded(connection: Connection | None) -> bool:
    return connection is None or connection.conn_type == "delay"


def _hold_in_ledger(conn_id: str, connection: Connection | None, target: Broker) -> Broker:
    from airflow_delay_provider.brokers.ledger_held import LedgerHeldBroker

    ledger = _open_named_ledger(connection)
    return LedgerHeldBroker(ledger, conn_id, target, limits=target.limits, clock=target.clock)


def _open_embedded(connection: Connection | None, clock: Clock | None) -> Broker:
    from airflow_delay_provider.brokers.embedded import EmbeddedBroker

    limits = Limits.from_settings(_extra_of(connection))
    return EmbeddedBroker(open_ledger(connection), limits=limits, clock=clock)


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
    """Say which extra of this package brings the client library that cannot be imported."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"connections of type {connection.conn_type} need {error.name}; install airflow-delay-provider[{extra}]"
        ) from error


def _extra_of(connection: Connection | None) -> Mapping[str, Any]:
    return connection.extra_dejson if connection is not None else {}


_BROKERS: dict[str, Callable[[Connection, Clock | None], Broker]] = {
    "delay": _open_embedded,
    "rabbitmq": _open_rabbitmq,
    "delay_kafka": _open_kafka,
    # The type of Airflow's own Kafka provider, whose extra holds settings of the client library.
    "kafka": _open_kafka,
}
