"""``python -m airflow_delay_provider.dispatcher``: the dispatcher without Airflow's command line."""

from __future__ import annotations

import argparse
import logging
import sys

from airflow_delay_provider.brokers.ledger.database import URL_VARIABLE, Ledger, default_ledger_url
from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.dispatcher.options import OPTIONS, read_config
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.domain.exceptions import DelayError, InvalidMessageError


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; 0 after a clean stop, 2 for bad options, 3 when the ledger cannot be used."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        dispatcher = Dispatcher(
            Ledger(options.ledger or default_ledger_url()), open_broker=_open, config=read_config(vars(options))
        )
        return 0 if dispatcher.run_until_signalled() else 1
    except DelayError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the command's answer
        return 2 if isinstance(error, InvalidMessageError) else 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m airflow_delay_provider.dispatcher",
        description="Deliver messages that are due, until SIGTERM or SIGINT.",
    )
    parser.add_argument("--ledger", help=f"Database URL. Default: ${URL_VARIABLE}, else $AIRFLOW_HOME/delay.db.")
    for option in OPTIONS:
        action = "append" if option.is_repeatable else "store"
        parser.add_argument(option.flag, metavar=option.metavar, help=option.help, action=action)
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    return parser


def _open(conn_id: str) -> Broker:
    # Only messages for another broker need Airflow's connections.
    from airflow_delay_provider.hooks.delay import open_destination

    return open_destination(conn_id)


if __name__ == "__main__":
    sys.exit(main())
