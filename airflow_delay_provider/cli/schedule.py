"""`airflow delay schedule` and `airflow delay send`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_delay_provider.brokers.port import Outcome
from airflow_delay_provider.cli.bulk import BulkDefaults, schedule_file
from airflow_delay_provider.cli.exit_codes import command
from airflow_delay_provider.cli.options import message_options, open_hook, read_payload
from airflow_delay_provider.cli.output import iso, print_one
from airflow_delay_provider.domain.arguments import OnConflict, OnPast, parse_choice
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.metrics import connect_metrics, count_confirmed

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.port import Receipt
    from airflow_delay_provider.domain.message import Message


@command
def schedule(args: Namespace) -> None:
    """Schedule one message, or one for each line of a file."""
    if args.file is not None:
        _schedule_file(args)
        return
    channel = _require_channel(args)
    connect_metrics()
    with open_hook(args.conn_id, hold=args.hold) as hook:
        message = hook.compose(
            channel,
            read_payload(args, max_bytes=hook.get_conn().limits.max_payload_bytes),
            deliver_at=args.at,
            deliver_after=args.after,
            on_past=args.on_past,
            message_id=args.id,
            **message_options(args),
        )
        (receipt,) = hook.schedule([message], on_conflict=args.on_conflict)
    _print_receipt(args, message, receipt)


@command
def send(args: Namespace) -> None:
    """Send one message now."""
    connect_metrics()
    with open_hook(args.conn_id, hold=args.hold) as hook:
        broker = hook.get_conn()
        message = hook.compose(
            args.channel,
            read_payload(args, max_bytes=broker.limits.max_payload_bytes),
            message_id=args.id,
            **message_options(args),
        )
        (receipt,) = broker.send([message])
    count_confirmed([(message, receipt)])
    _print_receipt(args, message, receipt)


def _schedule_file(args: Namespace) -> None:
    for option, value in (("--payload", args.payload), ("--payload-file", args.payload_file), ("--id", args.id)):
        if value is not None:
            raise InvalidMessageError("file", f"cannot be combined with {option}", "set it in each line of the file")
    defaults = BulkDefaults(
        channel=args.channel,
        deliver_at=args.at,
        deliver_after=args.after,
        on_past=parse_choice("on_past", OnPast, args.on_past),
        options=message_options(args),
    )
    connect_metrics()
    with open_hook(args.conn_id, hold=args.hold) as hook:
        outcomes = schedule_file(
            hook.get_conn(),
            Path(args.file),
            defaults=defaults,
            on_conflict=parse_choice("on_conflict", OnConflict, args.on_conflict),
        )
    document = {
        "file": args.file,
        "messages": outcomes.total(),
        **{outcome.value: outcomes[outcome] for outcome in Outcome},
    }
    print_one(args.output, document)


def _require_channel(args: Namespace) -> str:
    if args.channel is None:
        raise InvalidMessageError("channel", "missing", "name it first, as in `airflow delay schedule CHANNEL ...`")
    channel: str = args.channel
    return channel


def _print_receipt(args: Namespace, message: Message, receipt: Receipt) -> None:
    kept = receipt.outcome is Outcome.KEPT
    document = {
        "message_id": receipt.message_id,
        "channel": message.channel,
        "outcome": receipt.outcome.value,
        # The existing message keeps its own delivery time.
        "deliver_at": None if kept else iso(message.deliver_at),
    }
    print_one(args.output, document)
