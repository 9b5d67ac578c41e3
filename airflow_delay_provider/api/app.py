"""The web application that the plugin mounts: the HTTP API under ``/v1``, and the files of the UI."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request

from airflow_delay_provider.api import actions, messages, overview, retries, scheduling
from airflow_delay_provider.api.auth import require_reader
from airflow_delay_provider.api.ledgers import OpenLedgers
from airflow_delay_provider.api.problems import describe_problems, handle_errors
from airflow_delay_provider.api.static import mount_static

TITLE = "Delayed messages"


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Return the description of the API, with errors as they are."""
        return describe_problems(super().openapi())


def create_app() -> FastAPI:
    """Return the application. It opens nothing before the first request, and only signed-in users can use its API."""
    app = _Application(title=TITLE, docs_url=None, redoc_url=None, openapi_url=None, lifespan=_close_at_end)
    app.state.ledgers = OpenLedgers()
    handle_errors(app)
    app.include_router(_create_api())
    mount_static(app)
    return app


def _create_api() -> APIRouter:
    # Airflow mounts plugins without any check.
    api = APIRouter(prefix="/v1", dependencies=[Depends(require_reader)])
    for part in (messages, scheduling, actions, retries, overview):
        api.include_router(part.router)

    @api.get("/openapi.json", include_in_schema=False)
    def get_openapi(request: Request) -> dict[str, Any]:
        schema: dict[str, Any] = request.app.openapi()
        return schema | {"servers": [{"url": request.scope["root_path"] or "/"}]}

    return api


@asynccontextmanager
async def _close_at_end(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.ledgers.close()
