"""The web application that the plugin mounts. It has one page: a message and its history."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse

from airflow_delay_provider.api.auth import CurrentUser, require_reader, require_task_access
from airflow_delay_provider.api.message_page import dispatcher_warning, message_fields
from airflow_delay_provider.api.render import PageRoute, render
from airflow_delay_provider.api.static import mount_static
from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.heartbeats import read_dispatchers
from airflow_delay_provider.brokers.port import NeedsDispatcher
from airflow_delay_provider.domain.clock import Clock
from airflow_delay_provider.domain.exceptions import ConfigurationError, DelayError, UnknownMessageError
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.delay import DelayHook

log = logging.getLogger(__name__)
router = APIRouter(route_class=PageRoute)

#: After this time a connection is read again, so that changes need no restart.
REOPEN_AFTER = timedelta(minutes=1)


def create_app() -> FastAPI:
    """Return the application. It opens nothing before the first request and permits no anonymous access."""
    app = FastAPI(
        title="Delayed messages",
        dependencies=[Depends(require_reader)],
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=_close_at_end,
    )
    app.state.ledgers = OpenLedgers()
    app.include_router(router)
    mount_static(app)
    return app


@asynccontextmanager
async def _close_at_end(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.ledgers.close()


# An id may contain slashes. Not ``async``, so that the ledger is read in a thread.
@router.get("/messages/{message_id:path}")
def show_message(request: Request, user: CurrentUser, message_id: str, conn_id: str = DEFAULT_CONN_ID) -> HTMLResponse:
    """Show a message and its history to users who may see the task that scheduled it."""
    try:
        opened = _find_ledger(request.app.state.ledgers, conn_id)
        with opened.ledger.read() as connection:
            record = listing.get(connection, message_id, destination=opened.destination)
            if record.message.origin is not None:
                require_task_access(request, user, record.message.origin)
            history = listing.get_history(connection, message_id)
            warning = dispatcher_warning(
                record, read_dispatchers(connection), conn_id=conn_id, needs_dispatcher=opened.needs_dispatcher
            )
    except UnknownMessageError as error:
        raise HTTPException(
            404,
            f"The ledger of connection {conn_id!r} has no message {message_id!r}. Its retention time may be over, or it"
            " belongs to another connection.",
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
        # The same text for every reason, because the page must not reveal which connections exist.
        log.warning("Cannot show a message: %s", error)
        raise HTTPException(
            404, f"Connection {conn_id!r} has no ledger: it is not defined, or has another type."
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLedger:
    """The ledger of a connection."""

    ledger: Ledger
    clock: Clock
    #: Selects the messages of the connection; None selects all messages of the ledger.
    destination: str | None
    #: Whether a dispatcher moves the messages that the connection's broker holds itself.
    needs_dispatcher: bool
    opened_at: float


class OpenLedgers:
    """Opens the ledger of each connection on first use; threads share it."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._open: dict[str, OpenLedger] = {}
        self._lock = Lock()

    def get(self, conn_id: str) -> OpenLedger:
        """Return the ledger of a connection; it connects on the first read."""
        with self._lock:
            known = self._open.get(conn_id)
            if known is not None and self._monotonic() - known.opened_at < REOPEN_AFTER.total_seconds():
                return known
            self._open[conn_id] = fresh = self._open_ledger(conn_id)
        if known is not None:
            # Requests that are reading it keep their database connection until they are done.
            known.ledger.close()
        return fresh

    def close(self) -> None:
        """Close all ledgers."""
        with self._lock:
            for opened in self._open.values():
                opened.ledger.close()
            self._open.clear()

    def _open_ledger(self, conn_id: str) -> OpenLedger:
        hook = DelayHook(conn_id)
        return OpenLedger(
            ledger=hook.get_ledger(),
            clock=hook.get_conn().clock,
            destination=hook.get_listed_destination(),
            needs_dispatcher=isinstance(hook.get_conn(), NeedsDispatcher),
            opened_at=self._monotonic(),
        )
