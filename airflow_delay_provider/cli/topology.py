"""`airflow delay topology`: create, verify and delete the topology of a broker, and replay parked messages."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from airflow_delay_provider.cli.exit_codes import ExitCode, NotConfirmedError, command
from airflow_delay_provider.cli.output import print_document, print_fields, print_one, print_table
from airflow_delay_provider.domain.exceptions import ConfigurationError, InvalidMessageError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.port import HasTopology, KeepsUndelivered


@command
def create(args: Namespace) -> None:
    """Create missing objects, and prepare the named channels."""
    channels: list[str] = args.channel or []
    if args.create_channels and not channels:
        raise InvalidMessageError("create_channels", "no channel is named", "name each with --channel")
    with _open_broker(args.conn_id) as broker:
        for channel in channels if args.create_channels else ():
            broker.create_channel(channel)
        name = broker.create_topology(channels)
    if args.output == "json":
        print_document({"topology": name, "channels": channels})
    else:
        print_fields({"topology": name, "channels": ", ".join(channels)})


@command
def verify(args: Namespace) -> None:
    """Print problems and advice; exit with 1 if there is a problem."""
    with _open_broker(args.conn_id) as broker:
        issues = broker.verify_topology()
    problems = sum(issue.is_problem for issue in issues)
    kinds = [("problem" if issue.is_problem else "advice", issue.text) for issue in issues]
    if args.output == "json":
        print_document({"problems": problems, "issues": [{"kind": kind, "text": text} for kind, text in kinds]})
    else:
        print_fields({"problems": problems})
        if issues:
            print_table(("kind", "issue"), sorted(kinds, reverse=True))
    if problems:
        raise SystemExit(int(ExitCode.REFUSED))


@command
def delete(args: Namespace) -> None:
    """Delete the topology; refuse if messages are waiting, unless ``--force`` is given."""
    if not args.yes:
        raise NotConfirmedError("This deletes the queues or topics that hold delayed messages.")
    with _open_broker(args.conn_id) as broker:
        name = broker.delete_topology(even_if_messages_wait=args.force)
    print_one(args.output, {"topology": name, "deleted": True})


@command
def replay_parked(args: Namespace) -> None:
    """Send parked messages to their channels; without ``--yes`` only count them."""
    channels: list[str] = args.channel or []
    with _open_broker(args.conn_id) as broker:
        keeper = _require_keeper(broker, args.conn_id)
        parked = {name: n for name, n in keeper.count_parked_by_channel().items() if not channels or name in channels}
        replayed = keeper.replay_parked(channels) if args.yes else {}
    rows = [{"channel": name, "parked": n, "replayed": replayed.get(name, 0)} for name, n in sorted(parked.items())]
    if args.output == "json":
        print_document({"channels": rows})
    else:
        print_table(("channel", "parked", "replayed"), [list(row.values()) for row in rows])
    if parked and not args.yes:
        raise NotConfirmedError(f"This sends {sum(parked.values())} messages to their channels.")


def _require_keeper(broker: HasTopology, conn_id: str) -> KeepsUndelivered:
    from airflow_delay_provider.brokers.port import KeepsUndelivered

    if not isinstance(broker, KeepsUndelivered):
        raise ConfigurationError(
            f"delay_conn_id: the broker of connection {conn_id!r} does not park messages; use a rabbitmq connection"
        )
    return broker


@contextmanager
def _open_broker(conn_id: str) -> Iterator[HasTopology]:
    """Open the broker of a connection, whether or not it holds the messages itself."""
    from airflow_delay_provider.brokers.port import HasTopology
    from airflow_delay_provider.hooks.delay import open_destination

    with open_destination(conn_id) as broker:
        if not isinstance(broker, HasTopology):
            raise ConfigurationError(
                f"delay_conn_id: the broker of connection {conn_id!r} needs no topology;"
                " use a rabbitmq, delay_kafka or kafka connection"
            )
        yield broker
