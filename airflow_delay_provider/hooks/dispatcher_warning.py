"""Warn if no dispatcher serves the messages of a connection."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from airflow_delay_provider.domain.exceptions import DelayError
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.ledger.database import Ledger
    from airflow_delay_provider.brokers.ledger.heartbeats import DispatcherRecord
    from airflow_delay_provider.hooks.delay import DelayHook

log = logging.getLogger(__name__)


def find_dispatcher_warning(hook: DelayHook) -> str | None:
    """Say why nothing dispatches the messages of this connection, and what to do; None if no problem is known.

    RabbitMQ needs no dispatcher for messages that it holds itself. Kafka does, but its dispatcher may use another
    ledger, which cannot be read here. A ledger that does not answer raises nothing, because this is only advice.
    """
    from airflow_delay_provider.brokers.port import NeedsDispatcher

    broker = hook.get_conn()
    try:
        if broker.ledger is not None:
            return _warn_of_ledger(hook)
        return _warn_of_ladder(hook) if isinstance(broker, NeedsDispatcher) else None
    except DelayError as error:
        log.debug("Cannot check for dispatchers: %s", error)
        return None


def dispatcher_command(conn_id: str, *, hold: str | None = None, is_embedded: bool = True) -> str:
    """Return the command that starts a dispatcher for the ledger of a connection."""
    # With hold from the task, messages are in the configured ledger; with hold from the connection, in its own.
    names_ledger = conn_id != DEFAULT_CONN_ID if is_embedded else hold is None
    return f"airflow delay dispatcher --conn-id {conn_id}" if names_ledger else "airflow delay dispatcher"


def _warn_of_ledger(hook: DelayHook) -> str | None:
    from airflow_delay_provider.brokers.ledger.heartbeats import find_gap

    destination = hook.get_conn().destination
    gap = find_gap(_read(hook.get_ledger()), destination=destination)
    if gap is None:
        return None
    command = dispatcher_command(
        hook.delay_conn_id, hold=None if hook.hold is None else str(hook.hold), is_embedded=destination is None
    )
    return f"{gap.describe(command)} (ledger at {hook.get_ledger().name})"


def _warn_of_ladder(hook: DelayHook) -> str | None:
    from airflow_delay_provider.brokers.ledger.heartbeats import find_kafka_gap

    ledger = hook.get_ledger()
    if not ledger.is_there:
        return None
    gap = find_kafka_gap(_read(ledger), hook.delay_conn_id)
    if gap is None:
        return None
    warning = gap.describe(f"airflow delay dispatcher --kafka {hook.delay_conn_id}")
    return f"{warning}, unless one runs with another ledger than {ledger.name}" if gap.is_absence else warning


def _read(ledger: Ledger) -> list[DispatcherRecord]:
    from airflow_delay_provider.brokers.ledger.heartbeats import read_dispatchers

    with ledger.read() as connection:
        return read_dispatchers(connection)
