"""`airflow delay list`, `show` and `status`: what the ledger knows."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from airflow_delay_provider.cli.dispatchers import dispatcher_fields, print_dispatchers
from airflow_delay_provider.cli.exit_codes import command
from airflow_delay_provider.cli.opening import listing_of, open_hook, open_listing
from airflow_delay_provider.cli.options import parse_count
from airflow_delay_provider.cli.output import (
    history_fields,
    iso,
    payload_fields,
    preview,
    print_document,
    print_fields,
    print_table,
    record_fields,
)
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import require_channel, require_message_id
from airflow_delay_provider.exceptions import DelayError
from airflow_delay_provider.hooks.dispatchers import find_dispatcher_warning
from airflow_delay_provider.ledger import counts, heartbeats, listing

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
_HISTORY_COLUMNS = ("at", "change", "deliver_at", "reason")


@command
def list_messages(args: Namespace) -> None:
    """Print one page of messages in due order."""
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
    for name, token in (("next", page.next), ("prev", page.prev)):
        if token is not None:
            sys.stdout.write(f"{name}: --page {token}\n")


@command
def show(args: Namespace) -> None:
    """Print one message with its history; with ``--payload`` and no JSON, its payload and nothing else."""
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
    """Print how many messages each channel has in each state, what is next and late, and which dispatchers run."""
    channel = None if args.channel is None else require_channel(args.channel)
    now = SystemClock().now()
    with open_hook(args.conn_id) as hook:
        ledger, destination = listing_of(hook)
        with ledger.read() as connection:
            total = counts.by_state(connection, channel=channel, destination=destination)
            by_channel = counts.by_channel(connection, destination=destination) if channel is None else {channel: total}
            channels = [
                {"channel": name, **_waiting(connection, name, destination, states, now)}
                for name, states in by_channel.items()
            ]
            overall = _waiting(connection, channel, destination, total, now)
            dispatchers = heartbeats.read_dispatchers(connection)
        warning = find_dispatcher_warning(hook)
    undelivered = _undelivered(args.conn_id, channel)
    if args.output == "json":
        shown = [dispatcher_fields(each) for each in dispatchers]
        print_document(overall | {"channels": channels, "dispatchers": shown, "warning": warning} | undelivered)
        return
    columns = ("channel", *(state.name for state in State), "next_due", "overdue_seconds")
    rows = [*channels, {"channel": "(all)", **overall}] if channel is None else channels
    print_table(columns, [[(row | row["counts"])[name] for name in columns] for row in rows])
    for name, n in sorted((undelivered.get("refused") or {}).items()):
        print_fields({"refused": f"{n} for {name}"})
    if undelivered.get("parked"):
        print_fields({"parked": f"{undelivered['parked']}; see `airflow delay topology replay-parked`"})
    print_dispatchers(dispatchers)
    if warning is not None:
        sys.stderr.write(f"warning: {warning}\n")


def _undelivered(conn_id: str, channel: str | None) -> dict[str, Any]:
    """Say how many messages the broker itself keeps: refused ones by channel, and all that are parked."""
    from airflow_delay_provider.brokers.base import KeepsUndelivered
    from airflow_delay_provider.hooks.delay import open_destination

    try:
        with open_destination(conn_id) as broker:
            if not isinstance(broker, KeepsUndelivered):
                return {}
            refused, parked = broker.count_refused(), broker.count_parked()
    except DelayError as error:
        sys.stderr.write(f"refused and parked messages were not counted: {error}\n")
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
