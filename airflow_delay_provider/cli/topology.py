"""`airflow delay topology`: what a broker needs before messages can wait in it, and what it has kept apart."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from airflow_delay_provider.cli.exit_codes import ExitCode, command
from airflow_delay_provider.cli.output import print_document, print_fields, print_one, print_table
from airflow_delay_provider.exceptions import ConfigurationError, InvalidMessageError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.base import KeepsUndelivered, Provisioned


@command
def create(args: Namespace) -> None:
    """Create what is missing, and the way to the channels that are named."""
    channels: list[str] = args.channel or []
    with _open_provisioned(args.conn_id) as broker:
        name = broker.create_topology(channels)
    if args.output == "json":
        print_document({"topology": name, "channels": channels})
    else:
        print_fields({"topology": name, "channels": ", ".join(channels)})


@command
def verify(args: Namespace) -> None:
    """Print what is wrong or needs care, and end with 1 if anything is wrong."""
    with _open_provisioned(args.conn_id) as broker:
        findings = broker.verify_topology()
    problems = sum(finding.is_problem for finding in findings)
    kinds = [("problem" if finding.is_problem else "advice", finding.text) for finding in findings]
    if args.output == "json":
        print_document({"problems": problems, "findings": [{"kind": kind, "text": text} for kind, text in kinds]})
    else:
        print_fields({"problems": problems})
        if findings:
            print_table(("kind", "finding"), sorted(kinds, reverse=True))
    if problems:
        raise SystemExit(int(ExitCode.REFUSED))


@command
def delete(args: Namespace) -> None:
    """Take everything away; messages that wait are lost only if that is asked for."""
    if not args.yes:
        raise InvalidMessageError(
            "yes", "nothing can be scheduled once the topology is gone", "add --yes to delete it all the same"
        )
    with _open_provisioned(args.conn_id) as broker:
        name = broker.delete_topology(even_if_messages_wait=args.force)
    print_one(args.output, {"topology": name, "deleted": True})


@command
def replay_parked(args: Namespace) -> None:
    """Send parked messages to their channels; without ``--yes`` only count them."""
    channels: list[str] = args.channel or []
    with _open_provisioned(args.conn_id) as broker:
        keeper = _require_keeper(broker, args.conn_id)
        parked = {name: n for name, n in keeper.count_parked_by_channel().items() if not channels or name in channels}
        replayed = keeper.replay_parked(channels) if args.yes else {}
    rows = [{"channel": name, "parked": n, "replayed": replayed.get(name, 0)} for name, n in sorted(parked.items())]
    if args.output == "json":
        print_document({"channels": rows})
    else:
        print_table(("channel", "parked", "replayed"), [list(row.values()) for row in rows])
    if parked and not args.yes:
        raise InvalidMessageError(
            "yes", f"{sum(parked.values())} messages would be sent to their channels", "add --yes to send them"
        )


def _require_keeper(broker: Provisioned, conn_id: str) -> KeepsUndelivered:
    from airflow_delay_provider.brokers.base import KeepsUndelivered

    if not isinstance(broker, KeepsUndelivered):
        raise ConfigurationError(
            f"delay_conn_id: the broker of connection {conn_id!r} parks no messages; name a connection of type rabbitmq"
        )
    return broker


@contextmanager
def _open_provisioned(conn_id: str) -> Iterator[Provisioned]:
    """Open the broker of a connection as it is, whoever holds its messages."""
    from airflow_delay_provider.brokers.base import Provisioned
    from airflow_delay_provider.hooks.delay import open_destination

    with open_destination(conn_id) as broker:
        if not isinstance(broker, Provisioned):
            raise ConfigurationError(
                f"delay_conn_id: the broker of connection {conn_id!r} needs no topology, so there is nothing to create,"
                " verify or delete; name a connection of type rabbitmq, delay_kafka or kafka"
            )
        yield broker
