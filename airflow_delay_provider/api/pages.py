"""Pages: HTML from the templates in ``ui``, errors included."""

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
    """A route whose errors are pages too, for people who followed a link."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, which also checks access, with its errors turned into pages."""
        answer = super().get_route_handler()

        async def answer_with_page(request: Request) -> Response:
            try:
                return await answer(request)
            except HTTPException as error:
                return _render_error(request, error)

        return answer_with_page


def render(request: Request, template: str, *, status: int = 200, **fields: Any) -> HTMLResponse:
    """Return a page. Nothing in it runs, and it loads nothing, whatever a message contains."""
    environment, style_hash = _environment()
    # Airflow may live under a path of its own: the mounted application knows it from the request.
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
    titles = {401: "Please sign in", 403: "Not allowed", 404: "Not found", 503: "The ledger cannot be read"}
    sentences = {
        401: "Only people who are signed in to Airflow can see messages.",
        403: "You may not see this message: it needs access to plugins and to the task instances of its DAG.",
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
