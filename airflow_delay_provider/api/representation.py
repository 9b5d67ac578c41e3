"""Turn records of the ledger into what the API returns, with secrets masked."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, Literal, cast
from urllib.parse import quote, urlencode

from airflow.configuration import conf
from fastapi import Request

from airflow_delay_provider.api.auth import Permissions, mask_secrets
from airflow_delay_provider.api.ledgers import OpenLedger
from airflow_delay_provider.api.models import (
    HistoryEntry,
    MessageSummary,
    PageLinks,
    PayloadPreview,
    StateName,
    TaskOrigin,
)
from airflow_delay_provider.brokers.ledger.heartbeats import DispatcherRecord, find_gap, find_kafka_gap
from airflow_delay_provider.brokers.ledger.records import MessageRecord
from airflow_delay_provider.brokers.ledger.search import Found
from airflow_delay_provider.domain.clock import ONE_MS
from airflow_delay_provider.domain.lifecycle import Change, JournalEntry, State, allowed_from, outcome_of
from airflow_delay_provider.domain.message import Message, Origin
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.delay import dispatcher_command

ActionName = Literal["cancel", "reschedule", "expedite", "replay"]
CHANGES: dict[ActionName, Change] = {
    "cancel": Change.CANCELLED,
    "reschedule": Change.RESCHEDULED,
    "expedite": Change.EXPEDITED,
    "replay": Change.REQUEUED,
}


def name_of(state: State) -> StateName:
    """Return the name of a state."""
    return cast(StateName, state.name)


def api_path(request: Request, *parts: str, **query: Any) -> str:
    """Return a path of this API; ``query`` may contain lists."""
    path = "/".join([f"{request.scope['root_path']}/v1", *(quote(part, safe="") for part in parts)])
    given = {name: value for name, value in query.items() if value not in (None, [])}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path


class Presenter:
    """Presents the messages of one ledger to one user."""

    def __init__(self, request: Request, opened: OpenLedger, permissions: Permissions) -> None:
        self._request = request
        self._opened = opened
        self._permissions = permissions
        self.now = opened.now()

    def may_see(self, record: MessageRecord) -> bool:
        """Whether the user may see a message."""
        origin = record.message.origin
        return self._permissions.may_read(None if origin is None else origin.dag_id)

    def may_edit(self, record: MessageRecord) -> bool:
        """Whether the user may change a message."""
        origin = record.message.origin
        conn_id = self._opened.connection_of(record.destination)
        return self._permissions.may_edit(None if origin is None else origin.dag_id, conn_id)

    def summary(self, record: MessageRecord) -> dict[str, Any]:
        """Return the fields of a :class:`MessageSummary`."""
        message, origin = record.message, record.message.origin
        is_overdue = record.state is State.SCHEDULED and message.deliver_at < self.now
        named = None if self._opened.conn_id == DEFAULT_CONN_ID else self._opened.conn_id
        return {
            "id": message.id,
            "channel": message.channel,
            "state": name_of(record.state),
            "status": record.state.value,
            "deliver_at": message.deliver_at,
            "scheduled_at": record.scheduled_at,
            "updated_at": record.updated_at,
            "dispatched_at": record.dispatched_at,
            "lateness_ms": None if record.lateness is None else record.lateness // ONE_MS,
            "overdue_ms": (self.now - message.deliver_at) // ONE_MS if is_overdue else None,
            "content_type": message.content_type,
            "priority": message.priority,
            "key": message.key,
            "handled_count": message.handled_count,
            "generation": record.generation,
            "connection": self._opened.connection_of(record.destination),
            "held_by": "broker" if record.held_by_broker else "ledger",
            "origin": None if origin is None else _origin(origin),
            "can_edit": self.may_edit(record),
            "link": api_path(self._request, "messages", message.id, conn_id=named),
        }

    def page(self, found: Found) -> dict[str, Any]:
        """Return the tokens and links of a page."""
        return {
            "next": found.next,
            "prev": found.prev,
            "links": PageLinks(next=self._page_link(found.next), prev=self._page_link(found.prev)),
            "continuation": found.continuation,
        }

    def _page_link(self, token: str | None) -> str | None:
        if token is None:
            return None
        return f"{self._request.url.path}?{self._request.url.include_query_params(page=token).query}"

    def possible_actions(self, record: MessageRecord) -> list[ActionName]:
        """Return what the user can do with a message now."""
        if not self.may_edit(record):
            return []
        # Replaying is for dead messages only; a consumer requeues dispatched ones.
        allowed = {"replay": {State.DEAD}}
        return [
            name for name, change in CHANGES.items() if record.state in allowed.get(name, set(allowed_from(change)))
        ]

    def warning(self, record: MessageRecord, dispatchers: Sequence[DispatcherRecord]) -> str | None:
        """Say why nothing dispatches a scheduled message, and what to do; None if no problem is known."""
        if record.state is not State.SCHEDULED:
            return None
        conn_id = self._opened.connection_of(record.destination)
        if record.held_by_broker:
            # RabbitMQ needs no dispatcher. One for Kafka may use another ledger, so warn only if it was seen here.
            known = any(conn_id in each.kafka_connections for each in dispatchers)
            gap = find_kafka_gap(dispatchers, conn_id) if known else None
            command = f"airflow delay dispatcher --kafka {conn_id}"
        else:
            gap = find_gap(dispatchers, destination=record.destination)
            command = dispatcher_command(conn_id, is_embedded=record.destination is None)
        if gap is None:
            return None
        text: str = mask_secrets(gap.describe(command))
        return f"{text[:1].upper()}{text[1:]}."

    def task_link(self, origin: Origin | None) -> str | None:
        """Return the path of a task instance's page in Airflow, which may be served under a path."""
        if origin is None:
            return None
        dag, run, task = (quote(part, safe="") for part in (origin.dag_id, origin.run_id, origin.task_id))
        mapped = f"/mapped/{origin.map_index}" if origin.map_index >= 0 else ""
        return f"{self._request.base_url.path}dags/{dag}/runs/{run}/tasks/{task}{mapped}"


def summary_of(presenter: Presenter, record: MessageRecord) -> MessageSummary:
    """Return a message without its content."""
    return MessageSummary(**presenter.summary(record))


def _origin(origin: Origin) -> TaskOrigin:
    return TaskOrigin(dag_id=origin.dag_id, run_id=origin.run_id, task_id=origin.task_id, map_index=origin.map_index)


def history_entry(entry: JournalEntry) -> HistoryEntry:
    """Return a journal entry."""
    return HistoryEntry(
        change=entry.change.value,
        state=name_of(outcome_of(entry.change)),
        at=entry.at,
        deliver_at=entry.deliver_at,
        channel=entry.channel,
        reason=None if entry.reason is None else mask_secrets(entry.reason),
    )


# -- payloads --------------------------------------------------------------------------------------------------------


def payloads_are_shown() -> bool:
    """Return ``[delay] show_payloads``."""
    shown: bool = conf.getboolean("delay", "show_payloads", fallback=True)
    return shown


def preview(message: Message) -> PayloadPreview:
    """Return the beginning of a payload: JSON and text as text, anything else as base64."""
    if not payloads_are_shown():
        return PayloadPreview(size=len(message.payload), format="hidden", content=None, is_truncated=False)
    limit = conf.getint("delay", "shown_payload_bytes", fallback=65536)
    kind = message.content_type.partition(";")[0].strip().lower()
    is_json = kind == "application/json" or kind.endswith("+json")
    text = _masked_json(message.payload) if is_json else None
    shown_as: Literal["json", "text", "base64"] = "json" if text is not None else "text"
    if text is None and (is_json or kind.startswith("text/")):
        text = mask_secrets(message.payload.decode(errors="replace"))
    if text is None:
        whole, shown_as = message.payload, "base64"
        content = base64.b64encode(whole[:limit]).decode()
    else:
        # JSON may contain lone surrogates, which UTF-8 cannot encode.
        whole = text.encode(errors="backslashreplace")
        content = whole[:limit].decode(errors="ignore")
    return PayloadPreview(size=len(message.payload), format=shown_as, content=content, is_truncated=len(whole) > limit)


def masked_headers(message: Message) -> dict[str, str]:
    """Return the headers of a message."""
    masked: dict[str, str] = mask_secrets(dict(message.headers))
    return masked


def _masked_json(payload: bytes) -> str | None:
    try:
        return json.dumps(mask_secrets(json.loads(payload)), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
