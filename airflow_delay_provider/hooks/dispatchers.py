"""Whether a dispatcher serves the messages of a connection, as far as the ledger knows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from airflow_delay_provider.exceptions import DelayError
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID

if TYPE_CHECKING:
    from airflow_delay_provider.hooks.delay import DelayHook
    from airflow_delay_provider.ledger.database import Ledger
    from airflow_delay_provider.ledger.heartbeats import DispatcherRecord

log = logging.getLogger(__name__)

#: Ids in one sentence.
SHOWN_IDS = 5


def find_dispatcher_warning(hook: DelayHook) -> str | None:
    """Say why waiting messages of this connection would not be dispatched, and what to do; None is nothing known.

    RabbitMQ needs no dispatcher for the messages that it holds itself. Kafka does, but that one may use a ledger that
    is out of sight here. A ledger that cannot be read raises nothing: this is advice.
    """
    from airflow_delay_provider.brokers.base import Climbed

    broker = hook.get_conn()
    try:
        if getattr(broker, "ledger", None) is not None:
            return _warn_of_ledger(hook)
        return _warn_of_ladder(hook) if isinstance(broker, Climbed) else None
    except DelayError as error:
        log.debug("Whether a dispatcher runs is not known: %s", error)
        return None


def ledger_id_of(hook: DelayHook) -> str | None:
    """Return which ledger holds the messages of this connection; None is a broker that holds them itself."""
    from airflow_delay_provider.ledger.identity import read_identity

    ledger: Ledger | None = getattr(hook.get_conn(), "ledger", None)
    if ledger is None:
        return None
    with ledger.read() as connection:
        return read_identity(connection).id


def describe_waiting(waiting: Sequence[str], hook: DelayHook, *, of: int, patience: object) -> str:
    """Say that a task has waited long enough for messages, that they are still scheduled, and what to look at."""
    shown = ", ".join(waiting[:SHOWN_IDS]) + (" and others" if len(waiting) > SHOWN_IDS else "")
    connection = "" if hook.delay_conn_id == DEFAULT_CONN_ID else f" --conn-id {hook.delay_conn_id}"
    warning = find_dispatcher_warning(hook)
    advice = f": {warning}" if warning else f"; look at `airflow delay show {waiting[0]}{connection}`"
    unit = "" if isinstance(patience, timedelta) else " s"
    return (
        f"wait_timeout: {len(waiting)} of {of} messages were not dispatched within {patience}{unit} ({shown}); they are"
        f" still scheduled, this task has not cancelled them, and a new try waits for the same ones again{advice}"
    )


def dispatcher_command(conn_id: str, *, hold: str | None = None, is_embedded: bool = True) -> str:
    """Return the command that starts a dispatcher for the ledger of a connection."""
    # A hold that the task asks for is in the configured ledger, one that the connection asks for in the connection's.
    names_ledger = conn_id != DEFAULT_CONN_ID if is_embedded else hold is None
    return f"airflow delay dispatcher --conn-id {conn_id}" if names_ledger else "airflow delay dispatcher"


def _warn_of_ledger(hook: DelayHook) -> str | None:
    from airflow_delay_provider.ledger.service_gaps import find_gap

    destination: str | None = getattr(hook.get_conn(), "destination", None)
    gap = find_gap(_read(hook.get_ledger()), destination=destination)
    if gap is None:
        return None
    command = dispatcher_command(
        hook.delay_conn_id, hold=None if hook.hold is None else str(hook.hold), is_embedded=destination is None
    )
    return f"{gap.describe(command)} (ledger at {hook.get_ledger().name})"


def _warn_of_ladder(hook: DelayHook) -> str | None:
    from airflow_delay_provider.ledger.service_gaps import find_climb_gap

    ledger = hook.get_ledger()
    if not ledger.is_there:
        return None
    gap = find_climb_gap(_read(ledger), hook.delay_conn_id)
    if gap is None:
        return None
    warning = gap.describe(f"airflow delay dispatcher --climb {hook.delay_conn_id}")
    return f"{warning}, unless one runs with another ledger than {ledger.name}" if gap.is_absence else warning


def _read(ledger: Ledger) -> list[DispatcherRecord]:
    from airflow_delay_provider.ledger.heartbeats import read_dispatchers

    with ledger.read() as connection:
        return read_dispatchers(connection)
