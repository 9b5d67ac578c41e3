"""The content of a message's page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

from airflow_delay_provider.api.auth import mask_secrets
from airflow_delay_provider.brokers.ledger.heartbeats import DispatcherRecord, find_gap, find_kafka_gap
from airflow_delay_provider.brokers.ledger.records import MessageRecord
from airflow_delay_provider.domain.clock import ONE_MS
from airflow_delay_provider.domain.lifecycle import JournalEntry, State, outcome_of
from airflow_delay_provider.domain.message import Message, Origin
from airflow_delay_provider.hooks.delay import dispatcher_command

PREVIEW_BYTES = 2048
#: Limits the page of a message that was requeued many times.
SHOWN_ENTRIES = 100
_UNITS = (
    ("d", timedelta(days=1)),
    ("h", timedelta(hours=1)),
    ("min", timedelta(minutes=1)),
    ("s", timedelta(seconds=1)),
)


def message_fields(
    record: MessageRecord, history: Sequence[JournalEntry], *, now: datetime, conn_id: str
) -> dict[str, Any]:
    """Return the fields of ``message.html``, with secrets masked."""
    message, late = record.message, record.lateness
    waits = record.state is State.SCHEDULED
    preview, cut = preview_payload(message)
    return {
        "message": message,
        "conn_id": conn_id,
        "state": record.state.name.lower(),
        "overdue": describe_span(now - message.deliver_at) if waits and message.deliver_at < now else None,
        "due": _moment(message.deliver_at, now),
        "scheduled": _moment(record.scheduled_at, now),
        "dispatched": _moment(record.dispatched_at, now) if record.dispatched_at else None,
        "waits": waits,
        "lateness": None if late is None else f"{abs(late // ONE_MS):,} ms",
        "early": late is not None and late < timedelta(0),
        "destination": record.destination,
        "headers": mask_secrets(dict(message.headers)),
        "size": f"{len(message.payload):,} bytes",
        "preview": preview,
        "preview_is_cut": cut,
        "origin": message.origin,
        "origin_path": task_instance_path(message.origin) if message.origin else None,
        "entries": [_entry(entry, now) for entry in history[-SHOWN_ENTRIES:]],
        "entries_left_out": max(0, len(history) - SHOWN_ENTRIES),
        "seen": _moment(now, now),
    }


def dispatcher_warning(
    record: MessageRecord, dispatchers: Sequence[DispatcherRecord], *, conn_id: str, needs_dispatcher: bool
) -> str | None:
    """Say why nothing dispatches a waiting message, and what to do; None if no problem is known."""
    if record.state is not State.SCHEDULED:
        return None
    if record.held_by_broker:
        # RabbitMQ needs no dispatcher. One for Kafka may use another ledger, so warn only if it was seen in this one.
        known = any(conn_id in each.kafka_connections for each in dispatchers)
        gap = find_kafka_gap(dispatchers, conn_id) if needs_dispatcher and known else None
        command = f"airflow delay dispatcher --kafka {conn_id}"
    else:
        gap = find_gap(dispatchers, destination=record.destination)
        command = dispatcher_command(conn_id, is_embedded=record.destination is None)
    if gap is None:
        return None
    text: str = mask_secrets(gap.describe(command))
    return f"{text[:1].upper()}{text[1:]}."


def describe_span(span: timedelta) -> str:
    """Return a duration in its two largest units, such as ``2 h 5 min``."""
    rest, parts = abs(span), list[str]()
    for name, unit in _UNITS:
        count, rest = divmod(rest, unit)
        if count:
            parts.append(f"{count} {name}")
        elif parts:
            break
    return " ".join(parts[:2]) or f"{rest // ONE_MS} ms"


def describe_moment(moment: datetime, now: datetime) -> str:
    """Return a time relative to ``now``, such as ``in 1 h``."""
    if abs(moment - now) < ONE_MS:
        return "now"
    return f"in {describe_span(moment - now)}" if moment > now else f"{describe_span(now - moment)} ago"


def preview_payload(message: Message) -> tuple[str | None, bool]:
    """Return the beginning of a text or JSON payload, and whether there is more; None for other payloads."""
    kind = message.content_type.partition(";")[0].strip().lower()
    is_json = kind == "application/json" or kind.endswith("+json")
    if not is_json and not kind.startswith("text/"):
        return None, False
    text = _masked_json(message.payload) if is_json else None
    if text is None:
        text = mask_secrets(message.payload.decode(errors="replace"))
    # JSON may contain lone surrogates, which UTF-8 cannot encode.
    whole: bytes = text.encode(errors="backslashreplace")
    return whole[:PREVIEW_BYTES].decode(errors="ignore"), len(whole) > PREVIEW_BYTES


def task_instance_path(origin: Origin) -> str:
    """Return the path of a task instance's page in Airflow."""
    dag, run, task = (quote(part, safe="") for part in (origin.dag_id, origin.run_id, origin.task_id))
    mapped = f"/mapped/{origin.map_index}" if origin.map_index >= 0 else ""
    return f"dags/{dag}/runs/{run}/tasks/{task}{mapped}"


def _masked_json(payload: bytes) -> str | None:
    try:
        return json.dumps(mask_secrets(json.loads(payload)), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def _entry(entry: JournalEntry, now: datetime) -> dict[str, Any]:
    return {
        "change": entry.change.value.replace("_", "-"),
        "state": outcome_of(entry.change).name.lower(),
        "at": _moment(entry.at, now),
        "due": _moment(entry.deliver_at, now),
        "channel": entry.channel,
        "reason": None if entry.reason is None else mask_secrets(entry.reason),
    }


def _moment(moment: datetime, now: datetime) -> dict[str, str]:
    text = moment.isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")
    return {"iso": moment.isoformat(timespec="milliseconds"), "utc": text, "relative": describe_moment(moment, now)}
