"""Errors as problem details (RFC 9457)."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from airflow_delay_provider.api.auth import mask_secrets
from airflow_delay_provider.api.models import Problem
from airflow_delay_provider.domain.exceptions import (
    BrokerError,
    ConfigurationError,
    DelayError,
    InvalidMessageError,
    LifecycleError,
    PastDeliveryError,
    TooSoonError,
    UnknownMessageError,
)

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"

#: The first class that matches decides.
_STATUSES: tuple[tuple[type[DelayError], HTTPStatus], ...] = (
    (TooSoonError, HTTPStatus.PRECONDITION_FAILED),
    (PastDeliveryError, HTTPStatus.PRECONDITION_FAILED),
    (InvalidMessageError, HTTPStatus.BAD_REQUEST),
    (UnknownMessageError, HTTPStatus.NOT_FOUND),
    (LifecycleError, HTTPStatus.CONFLICT),
    (BrokerError, HTTPStatus.SERVICE_UNAVAILABLE),
    (ConfigurationError, HTTPStatus.SERVICE_UNAVAILABLE),
)
_MEANINGS = {
    400: "The request is not valid",
    401: "Not signed in",
    403: "Not allowed",
    404: "Not found",
    409: "The state of the message does not allow it",
    412: "The delivery time is too soon",
    503: "The ledger or the broker is not available",
}
_SENTENCES = {
    "Not authenticated": "Sign in to Airflow.",
    "Forbidden": "You need access to plugins to see delayed messages.",
}


def describes(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the ``responses`` of a route that may answer with these errors, and with those of every route."""
    return {
        status: {"model": Problem, "description": _MEANINGS[status]}
        for status in sorted({400, 401, 403, 503, *statuses})
    }


def describe_problems(schema: dict[str, Any]) -> dict[str, Any]:
    """Correct an OpenAPI schema: errors have their own media type, and invalid requests get 400 instead of 422."""
    for operation in (each for path in schema["paths"].values() for each in path.values()):
        operation["responses"].pop("422", None)
        for status, response in operation["responses"].items():
            if status >= "400" and "application/json" in response["content"]:
                response["content"] = {MEDIA_TYPE: response["content"].pop("application/json")}
    for unused in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(unused, None)
    return schema


def status_of(error: DelayError) -> HTTPStatus:
    """Return the HTTP status of an error."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), HTTPStatus.SERVICE_UNAVAILABLE)


def detail_of(error: DelayError) -> str:
    """Return the text of an error, without secrets."""
    text: str = mask_secrets(str(error))
    return text


def handle_errors(app: FastAPI) -> None:
    """Turn every error of the application into a problem."""
    app.exception_handler(DelayError)(_on_delay_error)
    app.exception_handler(HTTPException)(_on_http_error)
    app.exception_handler(RequestValidationError)(_on_invalid_request)


def respond(status: int, detail: str, *, field: str | None = None, headers: Any = None) -> JSONResponse:
    """Return a problem."""
    problem = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, field=field)
    return JSONResponse(problem.model_dump(), status_code=status, media_type=MEDIA_TYPE, headers=headers)


async def _on_delay_error(_request: Request, error: DelayError) -> JSONResponse:
    status = status_of(error)
    field = error.field if isinstance(error, InvalidMessageError) else None
    headers = {"Retry-After": "5"} if status is HTTPStatus.SERVICE_UNAVAILABLE else None
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        log.warning("A request for delayed messages failed: %s", detail_of(error))
    return respond(status, detail_of(error), field=field, headers=headers)


async def _on_http_error(request: Request, error: HTTPException) -> JSONResponse:
    detail = _SENTENCES.get(error.detail, error.detail)
    headers = error.headers
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # Starlette names the methods of one route; another one may have the same path.
        routes = [each for each in request.app.routes if each.matches(request.scope)[0] is not Match.NONE]
        methods = {method for route in routes for method in getattr(route, "methods", None) or ()}
        headers = {"Allow": ", ".join(sorted(methods or {"GET", "HEAD"}))}
    return respond(error.status_code, detail, headers=headers)


async def _on_invalid_request(_request: Request, error: RequestValidationError) -> JSONResponse:
    first, *others = error.errors()
    # The location begins with where the value is: body, query, path or header. Inside of payloads it may be very long.
    field = ".".join(str(part) for part in first["loc"][1:3]) or str(first["loc"][0])
    more = f" ({len(others)} more)" if others else ""
    return respond(400, f"{field}: {first['msg']}{more}", field=field)
