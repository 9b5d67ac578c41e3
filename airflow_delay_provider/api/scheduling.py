"""Routes that schedule messages."""

from __future__ import annotations

import base64
import binascii
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request, Response

from airflow_delay_provider.api.auth import CurrentPermissions, Permissions, require_custom_header
from airflow_delay_provider.api.ledgers import open_hook
from airflow_delay_provider.api.models import Channel, ScheduleBody, Scheduled, Text
from airflow_delay_provider.api.problems import describes, detail_of
from airflow_delay_provider.api.representation import api_path
from airflow_delay_provider.domain.arguments import OnConflict, parse_moment
from airflow_delay_provider.domain.exceptions import ConfigurationError, InvalidMessageError, PayloadError
from airflow_delay_provider.domain.message import require_aware
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID

router = APIRouter(tags=["scheduling"], dependencies=[Depends(require_custom_header)])

#: A larger body is not read at all; connections usually allow less.
MAX_BODY_BYTES = 64 * 1024 * 1024
#: Headers of the request with this prefix become headers of the message.
HEADER_PREFIX = "x-broker-header-"

ScheduledFor = Annotated[
    str | None,
    Header(
        alias="X-Broker-Scheduled-For",
        description="Delivery time as ISO-8601 with a time zone.",
        json_schema_extra={"format": "date-time"},
    ),
]
_CREATED: dict[int | str, dict[str, Any]] = {
    200: {"model": Scheduled, "description": "The id is taken, and on_conflict=keep: nothing was stored."},
    201: {"description": "The broker has confirmed the message."},
}


@router.post("/messages", status_code=201, responses=_CREATED | describes(404, 409, 412))
def schedule_message(
    request: Request,
    response: Response,
    permissions: CurrentPermissions,
    body: ScheduleBody,
    scheduled_for: ScheduledFor = None,
) -> Scheduled:
    """Schedule a message; needs the right to edit the connection. Returns once the broker has confirmed it."""
    deliver_at: Any = body.deliver_at
    if scheduled_for is not None:
        if deliver_at is not None or body.deliver_after is not None:
            raise InvalidMessageError(
                "X-Broker-Scheduled-For", "the body has a delivery time, too", "give only one of them"
            )
        deliver_at = _parse_header(scheduled_for)
    options = {
        "deliver_at": deliver_at,
        "deliver_after": body.deliver_after,
        "on_past": body.on_past,
        "message_id": body.message_id,
        "key": body.key,
        "headers": body.headers,
        "content_type": body.content_type,
        "priority": body.priority,
    }
    return _schedule(
        request,
        response,
        permissions,
        channel=body.channel,
        payload=_decode(body),
        conn_id=body.conn_id,
        hold=body.hold,
        on_conflict=body.on_conflict,
        options=options,
    )


def _parse_header(scheduled_for: str) -> datetime:
    return require_aware("X-Broker-Scheduled-For", parse_moment("X-Broker-Scheduled-For", scheduled_for))


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise PayloadError("payload", f"is larger than {MAX_BODY_BYTES} bytes", "send a reference to the data")
    return bytes(body)


_RAW_BODY = {"requestBody": {"content": {"*/*": {"schema": {"type": "string", "format": "binary"}}}}}


# A channel may contain slashes.
@router.post(
    "/channels/{channel:path}/messages",
    status_code=201,
    responses=_CREATED | describes(404, 409, 412),
    openapi_extra=_RAW_BODY,
)
def schedule_body(
    request: Request,
    response: Response,
    permissions: CurrentPermissions,
    channel: Channel,
    payload: Annotated[bytes, Depends(_read_body)],
    conn_id: Annotated[Text | None, Query()] = None,
    hold: Annotated[Literal["broker", "ledger"] | None, Query()] = None,
    on_conflict: Annotated[Literal["fail", "keep", "replace"] | None, Query()] = None,
    scheduled_for: ScheduledFor = None,
    message_id: Annotated[str | None, Header(alias="X-Broker-Message-Id")] = None,
    priority: Annotated[str, Header(alias="X-Broker-Priority")] = "0",
    key: Annotated[str | None, Header(alias="X-Broker-Key")] = None,
) -> Scheduled:
    """Schedule the body of the request as it is, with its content type; without a delivery time it is due now.

    Headers that begin with ``X-Broker-Header-`` become headers of the message.
    """
    options = {
        "deliver_at": None if scheduled_for is None else _parse_header(scheduled_for),
        "message_id": message_id,
        "key": key,
        "headers": {
            name.removeprefix(HEADER_PREFIX): value
            for name, value in request.headers.items()
            if name.startswith(HEADER_PREFIX)
        },
        "content_type": request.headers.get("content-type"),
        "priority": priority,
    }
    return _schedule(
        request,
        response,
        permissions,
        channel=channel,
        payload=payload,
        conn_id=conn_id,
        hold=hold,
        on_conflict=on_conflict,
        options=options,
    )


def _schedule(
    request: Request,
    response: Response,
    permissions: Permissions,
    *,
    channel: str,
    payload: Any,
    conn_id: str | None,
    hold: str | None,
    on_conflict: str | None,
    options: dict[str, Any],
) -> Scheduled:
    connection = conn_id or DEFAULT_CONN_ID
    if not permissions.may_edit_connection(connection):
        raise HTTPException(403, f"You need the right to edit connection {connection!r} to schedule messages with it.")
    with open_hook(connection, hold=hold) as hook:
        try:
            broker = hook.get_conn()
        except ConfigurationError as error:
            if conn_id is None and hold is None:
                raise
            raise HTTPException(404 if hold is None else 400, detail_of(error)) from error
        message = hook.compose(channel, payload, **options)
        default = OnConflict.FAIL if broker.knows_ids else OnConflict.KEEP
        [receipt] = hook.schedule([message], on_conflict=on_conflict or default)
    link = api_path(request, "messages", message.id, conn_id=conn_id)
    response.headers["Location"] = link
    if receipt.outcome == "kept":
        response.status_code = 200
    return Scheduled(message_id=message.id, outcome=receipt.outcome.value, deliver_at=message.deliver_at, link=link)


def _decode(body: ScheduleBody) -> Any:
    if not body.payload_base64:
        return body.payload
    try:
        if not isinstance(body.payload, str):
            raise ValueError("it is not text")
        return base64.b64decode(body.payload, validate=True)
    except (ValueError, binascii.Error) as error:
        raise PayloadError("payload", f"is not base64 ({error})", "encode it, or leave payload_base64 out") from None
