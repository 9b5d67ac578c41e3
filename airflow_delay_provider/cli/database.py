"""`airflow delay db migrate`, `check` and `downgrade`."""

from __future__ import annotations

from argparse import Namespace

from airflow_delay_provider.cli.exit_codes import NotConfirmedError, command
from airflow_delay_provider.cli.options import open_ledger
from airflow_delay_provider.cli.output import print_one


@command
def migrate(args: Namespace) -> None:
    """Create or upgrade the tables."""
    with open_ledger(args.conn_id) as ledger:
        print_one(args.output, {"ledger": ledger.name, "before": ledger.revision(), "revision": ledger.migrate()})


@command
def check(args: Namespace) -> None:
    """Check that the tables fit this version."""
    with open_ledger(args.conn_id) as ledger:
        print_one(args.output, {"ledger": ledger.name, "revision": ledger.require_schema()})


@command
def downgrade(args: Namespace) -> None:
    """Downgrade the tables; ``base`` drops them and all messages."""
    if not args.yes:
        lost = "drops all tables and messages" if args.revision == "base" else "loses data of later revisions"
        raise NotConfirmedError(f"Going back to revision {args.revision!r} {lost}.")
    with open_ledger(args.conn_id) as ledger:
        before = ledger.revision()
        ledger.downgrade(args.revision)
        print_one(args.output, {"ledger": ledger.name, "before": before, "revision": ledger.revision()})
