"""`airflow delay cancel`, `reschedule` and `expedite`: messages that still wait."""

from __future__ import annotations

from argparse import Namespace

from airflow_delay_provider.cli.exit_codes import command
from airflow_delay_provider.cli.opening import open_hook
from airflow_delay_provider.cli.output import iso, print_document, print_table
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import require_message_id
from airflow_delay_provider.domain.schedule import resolve_deliver_at
from airflow_delay_provider.exceptions import InvalidMessageError


@command
def cancel(args: Namespace) -> None:
    """Make sure that none of the messages is dispatched."""
    with open_hook(args.conn_id, hold=args.hold) as hook:
        hook.get_conn().cancel(_ids_of(args))
    _print_change(args, Change.CANCELLED)


@command
def reschedule(args: Namespace) -> None:
    """Move all of the messages to another time."""
    if args.at is None and args.after is None:
        raise InvalidMessageError(
            "deliver_at", "no time is given", "give --at or --after, or use `airflow delay expedite` for now"
        )
    with open_hook(args.conn_id, hold=args.hold) as hook:
        broker = hook.get_conn()
        deliver_at = resolve_deliver_at(
            deliver_at=args.at, deliver_after=args.after, on_past=args.on_past, now=broker.clock.now()
        )
        broker.reschedule(_ids_of(args), deliver_at)
    _print_change(args, Change.RESCHEDULED, deliver_at=iso(deliver_at))


@command
def expedite(args: Namespace) -> None:
    """Make all of the messages due now."""
    with open_hook(args.conn_id, hold=args.hold) as hook:
        hook.get_conn().expedite(_ids_of(args))
    _print_change(args, Change.EXPEDITED)


def _ids_of(args: Namespace) -> list[str]:
    return [require_message_id(message_id) for message_id in args.ids]


def _print_change(args: Namespace, change: Change, *, deliver_at: str | None = None) -> None:
    if args.output == "json":
        print_document({"change": change.value, "message_ids": args.ids, "deliver_at": deliver_at})
        return
    print_table(("message_id", "change", "deliver_at"), [(item, change.value, deliver_at) for item in args.ids])
