"""`airflow delay list`, `show` and `status`, read from the ledger."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from airflow_delay_provider.brokers.ledger import channels as channels_of_ledger
from airflow_delay_provider.brokers.ledger import heartbeats, listing
from airflow_delay_provider.cli.exit_codes import command
from airflow_delay_provider.cli.options import listing_of, open_hook, open_listing
from airflow_delay_provider.cli.output import (
    history_fields,
    iso,
    payload_fields,
    preview,
    print_document,
    print_fields,
    print_page_tokens,
    print_table,
    record_fields,
)
from airflow_delay_provider.domain.arguments import parse_count
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.domain.exceptions import DelayError
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import require_channel, require_message_id
from airflow_delay_provider.hooks.delay import find_dispatcher_warning

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.ledger.heartbeats import DispatcherRecord, LoopReport

_LIST_COLUMNS = (
    "message_id",
    "channel",
    "state",
    "deliver_at",
    "dispatched_at",
    "lateness_seconds",
    "priority",
    "handled_count",
)
_DISPATCHER_COLUMNS = ("dispatcher", "status", "version", "started_at", "seen_at", "serves", "problems")
_HISTORY_COLUMNS = ("at", "change", "deliver_at", "reason")


@command
def list_messages(args: Namespace) -> None:
    """Print one page of messages, ordered by delivery time."""
    channel = None if args.channel is None else require_channel(args.channel)
    states = [State.parse(text) for text in args.state or ()]
    size = parse_count("limit", args.limit)
    with open_listing(args.conn_id) as (ledger, destination), ledger.read() as connection:
        page = listing.page(
            connection, channel=channel, destination=destination, states=states, token=args.page, size=size
        )
    messages = [record_fields(record) for record in page.records]
    if args.output == "json":
        print_document({"messages": messages, "next": page.next, "prev": page.prev})
        return
    print_table(_LIST_COLUMNS, [[message[name] for name in _LIST_COLUMNS] for message in messages])
    print_page_tokens(page)


@command
def show(args: Namespace) -> None:
    """Print one message with its history, or with ``--payload`` only its payload."""
    require_message_id(args.id)
    with open_listing(args.conn_id) as (ledger, destination), ledger.read() as connection:
        record = listing.get(connection, args.id, destination=destination)
        history = [history_fields(entry) for entry in listing.get_history(connection, args.id)]
    payload = record.message.payload
    fields = record_fields(record) | {"payload_bytes": len(payload)}
    if args.output == "json":
        content = payload_fields(payload) if args.payload else {"payload_preview": preview(payload)}
        print_document(fields | content | {"history": history})
    elif args.payload:
        sys.stdout.flush()
        sys.stdout.buffer.write(payload)
    else:
        print_fields(fields | {"payload_preview": preview(payload)})
        sys.stdout.write("\n")
        print_table(_HISTORY_COLUMNS, [[entry[name] for name in _HISTORY_COLUMNS] for entry in history])


@command
def status(args: Namespace) -> None:
    """Print message counts by channel and state, the next delivery time, how late it is, and the dispatchers."""
    channel = None if args.channel is None else require_channel(args.channel)
    now = SystemClock().now()
    with open_hook(args.conn_id) as hook:
        ledger, destination = listing_of(hook)
        with ledger.read() as connection:
            total = listing.count_by_state(connection, channel=channel, destination=destination)
            by_channel = (
                listing.count_by_channel(connection, destination=destination) if channel is None else {channel: total}
            )
            channels: list[dict[str, Any]] = [
                {"channel": name, **_waiting(connection, name, destination, states, now)}
                for name, states in by_channel.items()
            ]
            overall = _waiting(connection, channel, destination, total, now)
            depths = channels_of_ledger.depths(connection, channel) if destination is None else {}
            dispatchers = heartbeats.read_dispatchers(connection)
        warning = find_dispatcher_warning(hook)
    for row in channels:
        row["in_channel"] = depths.get(row["channel"])
    overall["in_channel"] = sum(depths.values()) if depths else None
    undelivered = _undelivered(args.conn_id, channel)
    if args.output == "json":
        shown = [_dispatcher_fields(each) for each in dispatchers]
        print_document(overall | {"channels": channels, "dispatchers": shown, "warning": warning} | undelivered)
        return
    columns = ("channel", *(state.name for state in State), "in_channel", "next_due", "overdue_seconds")
    rows = [*channels, {"channel": "(all)", **overall}] if channel is None else channels
    print_table(columns, [[(row | row["counts"])[name] for name in columns] for row in rows])
    for name, n in sorted((undelivered.get("refused") or {}).items()):
        print_fields({"refused": f"{n} for {name}"})
    if undelivered.get("parked"):
        print_fields({"parked": f"{undelivered['parked']}; run `airflow delay topology replay-parked`"})
    _print_dispatchers(dispatchers)
    if warning is not None:
        sys.stderr.write(f"warning: {warning}\n")


def _undelivered(conn_id: str, channel: str | None) -> dict[str, Any]:
    """Return how many messages the broker keeps: refused ones by channel, and all parked ones."""
    from airflow_delay_provider.brokers.port import KeepsUndelivered
    from airflow_delay_provider.hooks.delay import open_destination

    try:
        with open_destination(conn_id) as broker:
            if not isinstance(broker, KeepsUndelivered):
                return {}
            refused, parked = broker.count_refused(), broker.count_parked()
    except DelayError as error:
        sys.stderr.write(f"warning: refused and parked messages were not counted: {error}\n")
        return {}
    if refused is not None:
        refused = {name: n for name, n in refused.items() if channel in (None, name)}
    return {"refused": refused, "parked": parked}


def _waiting(
    connection: Connection, channel: str | None, destination: str | None, states: Mapping[State, int], now: datetime
) -> dict[str, Any]:
    due = None
    if states[State.SCHEDULED]:
        due = listing.next_scheduled_at(connection, channel=channel, destination=destination)
    return {
        "counts": {state.name: n for state, n in states.items()},
        "next_due": iso(due),
        "overdue_seconds": None if due is None else round(max(0.0, (now - due).total_seconds()), 3),
    }


def _dispatcher_fields(record: DispatcherRecord) -> dict[str, Any]:
    """Return the record of a dispatcher."""
    return {
        "owner": record.owner,
        "status": record.status,
        "host": record.host,
        "pid": record.pid,
        "version": record.version,
        "started_at": iso(record.started_at),
        "seen_at": iso(record.seen_at),
        "seconds_since_seen": record.age.total_seconds(),
        "stopped_at": iso(record.stopped_at),
        "index_connections": list(record.index_connections),
        "kafka_connections": list(record.kafka_connections),
        "destinations": list(record.destinations),
        "loops": [_loop_fields(loop) for loop in record.loops],
    }


def _print_dispatchers(records: Sequence[DispatcherRecord]) -> None:
    """Print one line for each dispatcher."""
    if not records:
        return
    sys.stdout.write("\n")
    print_table(_DISPATCHER_COLUMNS, [_dispatcher_row(record) for record in records])


def _dispatcher_row(record: DispatcherRecord) -> list[object]:
    serves = [
        *(f"--index {conn_id}" for conn_id in record.index_connections),
        *(f"--kafka {conn_id}" for conn_id in record.kafka_connections),
        *(f"sends to {conn_id}" for conn_id in record.destinations),
    ]
    problems = [f"{loop.name} {loop.problem}" for loop in record.loops if loop.problem] if record.is_alive else []
    return [
        record.owner,
        record.status,
        record.version,
        iso(record.started_at),
        iso(record.seen_at),
        ", ".join(["ledger", *serves]),
        "; ".join(problems),
    ]


def _loop_fields(loop: LoopReport) -> dict[str, Any]:
    return {
        "name": loop.name,
        "well": loop.well,
        "succeeded_at": iso(loop.succeeded_at),
        "failures": loop.failures,
        "error": loop.error,
    }
