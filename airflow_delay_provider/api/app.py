"""The web application that the plugin mounts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI

from airflow_delay_provider.api import messages
from airflow_delay_provider.api.auth import require_reader
from airflow_delay_provider.api.ledgers import OpenLedgers


def create_app() -> FastAPI:
    """Return the application; nothing is opened before the first request, and nothing in it is anonymous."""
    app = FastAPI(
        title="Delayed messages",
        dependencies=[Depends(require_reader)],
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=_close_at_end,
    )
    app.state.ledgers = OpenLedgers()
    app.include_router(messages.router)
    return app


@asynccontextmanager
async def _close_at_end(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.ledgers.close()
