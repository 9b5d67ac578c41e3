"""The page of one message."""

from __future__ import annotations

import logging

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse

from airflow_delay_provider.api.auth import CurrentUser, require_task_access
from airflow_delay_provider.api.ledgers import OpenLedger, OpenLedgers
from airflow_delay_provider.api.message_page import dispatcher_warning, message_fields
from airflow_delay_provider.api.pages import PageRoute, render
from airflow_delay_provider.exceptions import ConfigurationError, DelayError, UnknownMessageError
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.ledger import listing
from airflow_delay_provider.ledger.heartbeats import read_dispatchers

log = logging.getLogger(__name__)
router = APIRouter(route_class=PageRoute)


# An id may contain slashes. Not ``async``: the ledger is read in a thread.
@router.get("/messages/{message_id:path}")
def show_message(request: Request, user: CurrentUser, message_id: str, conn_id: str = DEFAULT_CONN_ID) -> HTMLResponse:
    """Show one message and its history to those who may see the task that it comes from."""
    try:
        opened = _find_ledger(request.app.state.ledgers, conn_id)
        with opened.ledger.read() as connection:
            record = listing.get(connection, message_id, destination=opened.destination)
            if record.message.origin is not None:
                require_task_access(request, user, record.message.origin)
            history = listing.get_history(connection, message_id)
            warning = dispatcher_warning(record, read_dispatchers(connection), conn_id=conn_id, climbed=opened.climbed)
    except UnknownMessageError as error:
        raise HTTPException(
            404,
            f"The ledger of connection {conn_id!r} knows no message {message_id!r}. It may have been removed after its"
            " retention time, or it waits with another connection.",
        ) from error
    except DelayError as error:
        raise HTTPException(503, str(error)) from error
    fields = message_fields(record, history, now=opened.clock.now(), conn_id=conn_id)
    return render(request, "message.html", warning=warning, **fields)


def _find_ledger(ledgers: OpenLedgers, conn_id: str) -> OpenLedger:
    try:
        return ledgers.get(conn_id)
    except ConfigurationError as error:
        if conn_id == DEFAULT_CONN_ID:
            raise
        # One answer for every reason: the page must not tell which connections exist and of what type they are.
        log.warning("No page of a message: %s", error)
        raise HTTPException(
            404, f"Connection {conn_id!r} has no ledger to read: it is not defined, or it is of another type."
        ) from error
