"""`airflow delay db migrate`, `check` and `downgrade`: the tables of the ledger."""

from __future__ import annotations

from argparse import Namespace

from airflow_delay_provider.cli.exit_codes import command
from airflow_delay_provider.cli.opening import open_ledger
from airflow_delay_provider.cli.output import print_one
from airflow_delay_provider.exceptions import InvalidMessageError


@command
def migrate(args: Namespace) -> None:
    """Create the tables or bring them to this version."""
    with open_ledger(args.conn_id) as ledger:
        print_one(args.output, {"ledger": ledger.name, "before": ledger.revision(), "revision": ledger.migrate()})


@command
def check(args: Namespace) -> None:
    """Say whether this version can work with the tables."""
    with open_ledger(args.conn_id) as ledger:
        print_one(args.output, {"ledger": ledger.name, "revision": ledger.require_schema()})


@command
def downgrade(args: Namespace) -> None:
    """Take the tables back; going back to ``base`` drops them and every message in them."""
    if not args.yes:
        raise InvalidMessageError(
            "yes", f"going back to {args.revision!r} loses what later versions stored", "add --yes to do it"
        )
    with open_ledger(args.conn_id) as ledger:
        before = ledger.revision()
        ledger.downgrade(args.revision)
        print_one(args.output, {"ledger": ledger.name, "before": before, "revision": ledger.revision()})
