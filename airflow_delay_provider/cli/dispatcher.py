"""`airflow delay dispatcher`: run the dispatcher with options from the command line and from ``[delay]``."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from airflow_delay_provider.cli.exit_codes import ExitCode, command
from airflow_delay_provider.cli.options import open_ledger

if TYPE_CHECKING:
    from airflow_delay_provider.dispatcher.options import DispatcherConfig


@command
def dispatcher(args: Namespace) -> None:
    """Run until SIGTERM or SIGINT."""
    from airflow_delay_provider.dispatcher.service import Dispatcher
    from airflow_delay_provider.hooks.delay import open_destination
    from airflow_delay_provider.metrics import AirflowMetrics, connect_metrics

    config = _config_of(args)
    with open_ledger(args.conn_id) as ledger:
        connect_metrics()
        service = Dispatcher(ledger, open_broker=open_destination, config=config, observers=[AirflowMetrics()])
        stopped_cleanly = service.run_until_signalled()
    if not stopped_cleanly:
        raise SystemExit(int(ExitCode.REFUSED))


def _config_of(args: Namespace) -> DispatcherConfig:
    from airflow.sdk.configuration import conf

    from airflow_delay_provider.dispatcher.options import read_config

    return read_config(vars(args), lambda setting: conf.get("delay", setting))
