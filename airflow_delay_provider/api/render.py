"""Renders the HTML templates in ``ui``, also for errors."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Coroutine
from functools import cache
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from fastapi import HTTPException, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined


class PageRoute(APIRoute):
    """A route that shows errors as HTML, because people open it in a browser."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, which also checks access, and render its errors as pages."""
        handle = super().get_route_handler()

        async def handle_with_error_page(request: Request) -> Response:
            try:
                return await handle(request)
            except HTTPException as error:
                return _render_error(request, error)

        return handle_with_error_page


def render(request: Request, template: str, *, status: int = 200, **fields: Any) -> HTMLResponse:
    """Render a page. Its policy forbids scripts and external content, whatever a message contains."""
    environment, style_hash = _environment()
    # Airflow may be served under a path; the request contains it.
    page = environment.get_template(template).render(airflow=request.base_url.path, **fields)
    policy = f"default-src 'none'; style-src '{style_hash}'; base-uri 'none'; form-action 'none'"
    headers = {
        "Content-Security-Policy": f"{policy}; frame-ancestors 'self'",
        "Cache-Control": "no-store",
        "Referrer-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(page, status_code=status, headers=headers)


def _render_error(request: Request, error: HTTPException) -> HTMLResponse:
    titles = {401: "Please sign in", 403: "Not allowed", 404: "Not found", 503: "Cannot read the ledger"}
    sentences = {
        401: "Sign in to Airflow to see messages.",
        403: "You may not see this message. You need access to plugins and to the task instances of its DAG.",
    }
    here = f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path
    return render(
        request,
        "error.html",
        status=error.status_code,
        code=error.status_code,
        title=titles.get(error.status_code) or HTTPStatus(error.status_code).phrase,
        sentence=sentences.get(error.status_code) or error.detail,
        sign_in=f"{request.base_url.path}api/v2/auth/login?next={quote(here, safe='')}"
        if error.status_code == HTTPStatus.UNAUTHORIZED
        else None,
    )


@cache
def _environment() -> tuple[Environment, str]:
    environment = Environment(
        loader=PackageLoader("airflow_delay_provider", "ui"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    digest = hashlib.sha256(environment.get_template("page.css").render().encode()).digest()
    return environment, f"sha256-{base64.b64encode(digest).decode()}"
