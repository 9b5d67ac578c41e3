"""``python -m airflow_delay_provider.dispatcher``: the dispatcher without the cost of Airflow's command line."""

from __future__ import annotations

import argparse
import logging
import sys
from datetime import timedelta

from airflow_delay_provider.brokers.base import Broker
from airflow_delay_provider.dispatcher.config import DispatcherConfig
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.exceptions import DelayError
from airflow_delay_provider.ledger.database import Ledger
from airflow_delay_provider.ledger.location import URL_VARIABLE, default_ledger_url


def main(arguments: list[str] | None = None) -> int:
    """Run until signalled; 0 after a clean stop, 3 when the ledger cannot be used."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        dispatcher = Dispatcher(
            Ledger(options.ledger or default_ledger_url()), open_broker=_open, config=_config_of(options)
        )
        return 0 if dispatcher.run_until_signalled() else 1
    except DelayError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the command's answer
        return 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m airflow_delay_provider.dispatcher",
        description="Hand due messages of a ledger to their channels until stopped by SIGTERM or SIGINT.",
    )
    defaults = DispatcherConfig()
    parser.add_argument("--ledger", help=f"database URL; default: ${URL_VARIABLE}, else $AIRFLOW_HOME/delay.db")
    parser.add_argument("--batch", type=int, default=defaults.batch, help="most messages in one transaction")
    parser.add_argument(
        "--poll-interval",
        type=float,
        default=defaults.poll_interval.total_seconds(),
        help="seconds after which a message scheduled just now is noticed at the latest",
    )
    parser.add_argument(
        "--rate-limit", type=float, help="most messages of the ledger a second; what --climb moves is not limited"
    )
    parser.add_argument(
        "--retention-days",
        type=float,
        default=defaults.retention / timedelta(days=1),
        help="messages that ended are kept this long",
    )
    parser.add_argument(
        "--project",
        metavar="CONN",
        action="append",
        default=[],
        help="follow the journal of this connection, so that what its broker holds can be listed; may be repeated",
    )
    parser.add_argument(
        "--climb",
        metavar="CONN",
        action="append",
        default=[],
        help="move on what waits in the Kafka of this connection; may be repeated",
    )
    parser.add_argument(
        "--instance",
        metavar="NAME",
        help="a name that only this dispatcher has, also after a restart, which then takes up --climb at once",
    )
    parser.add_argument("--health-host", default=defaults.health_host, help="where /health and /metrics answer")
    parser.add_argument(
        "--health-port", type=int, default=defaults.health_port, help="0 is any free port, -1 is no HTTP"
    )
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    return parser


def _config_of(options: argparse.Namespace) -> DispatcherConfig:
    return DispatcherConfig(
        batch=options.batch,
        poll_interval=timedelta(seconds=options.poll_interval),
        rate_limit=options.rate_limit,
        retention=timedelta(days=options.retention_days),
        project=tuple(options.project),
        climb=tuple(options.climb),
        instance=options.instance or None,
        health_host=options.health_host,
        health_port=None if options.health_port < 0 else options.health_port,
    )


def _open(conn_id: str) -> Broker:
    # Only messages for another broker need Airflow's connections.
    from airflow_delay_provider.hooks.delay import open_destination

    return open_destination(conn_id)


if __name__ == "__main__":
    sys.exit(main())
