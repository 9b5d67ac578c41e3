"""`airflow delay db migrate`, `check` and `downgrade`: the tables of the ledger."""

from __future__ import annotations

from argparse import Namespace

from alembic.util.exc import CommandError
from sqlalchemy.exc import SQLAlchemyError

from airflow_delay_provider.cli.exit_codes import command
from airflow_delay_provider.cli.opening import open_ledger
from airflow_delay_provider.cli.output import print_document, print_fields
from airflow_delay_provider.exceptions import InvalidMessageError, LedgerError
from airflow_delay_provider.ledger import migrations


@command
def migrate(args: Namespace) -> None:
    """Create the tables or bring them to this version."""
    with open_ledger(args.conn_id) as ledger:
        before = ledger.revision()
        _print(
            args, {"ledger": ledger.name, "before": before, "revision": before if _serves(before) else ledger.migrate()}
        )


@command
def check(args: Namespace) -> None:
    """Say whether this version can work with the tables."""
    with open_ledger(args.conn_id) as ledger:
        revision = ledger.revision()
        if not _serves(revision):
            raise LedgerError(
                f"the ledger at {ledger.name} has schema revision {revision}, this version needs {migrations.HEAD};"
                " run `airflow delay db migrate`"
            )
        _print(args, {"ledger": ledger.name, "revision": revision})


@command
def downgrade(args: Namespace) -> None:
    """Take the tables back; going back to ``base`` drops them and every message in them."""
    if not args.yes:
        raise InvalidMessageError(
            "yes", f"going back to {args.revision!r} loses what later versions stored", "add --yes to do it"
        )
    with open_ledger(args.conn_id) as ledger:
        before = ledger.revision()
        try:
            migrations.downgrade(ledger.engine, args.revision)
        except CommandError:
            raise InvalidMessageError(
                "revision",
                f"{args.revision!r} is not an older version of {before}",
                "use base, or a revision before it",
            ) from None
        except SQLAlchemyError as error:
            raise LedgerError(f"the ledger at {ledger.name} was not changed ({error}); try again") from error
        _print(args, {"ledger": ledger.name, "before": before, "revision": ledger.revision()})


def _serves(revision: str | None) -> bool:
    """Say whether this version can work with the tables; newer ones are fine, as in a rolling upgrade."""
    return revision is not None and revision >= migrations.HEAD


def _print(args: Namespace, document: dict[str, str | None]) -> None:
    (print_document if args.output == "json" else print_fields)(document)
