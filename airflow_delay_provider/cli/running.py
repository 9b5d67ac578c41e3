"""`airflow delay dispatcher`: the service that hands due messages to their channels."""

from __future__ import annotations

from argparse import Namespace
from datetime import timedelta
from typing import TYPE_CHECKING

from airflow_delay_provider.cli.exit_codes import ExitCode, command
from airflow_delay_provider.cli.opening import open_ledger
from airflow_delay_provider.cli.options import parse_count, parse_number
from airflow_delay_provider.exceptions import InvalidMessageError

if TYPE_CHECKING:
    from airflow_delay_provider.dispatcher.config import DispatcherConfig


@command
def dispatcher(args: Namespace) -> None:
    """Serve the ledger of a connection until SIGTERM or SIGINT."""
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
    from airflow_delay_provider.dispatcher.config import DispatcherConfig

    health_port = _parse_port(*_setting(args, "health_port"))
    return DispatcherConfig(
        batch=parse_count(*_setting(args, "batch")),
        poll_interval=timedelta(seconds=parse_number(*_setting(args, "poll_interval"))),
        # Zero is no limit.
        rate_limit=parse_number(*_setting(args, "rate_limit"), from_zero=True) or None,
        retention=timedelta(days=parse_number(*_setting(args, "retention_days"))),
        project=_connections(args.project, "project_connections"),
        climb=_connections(args.climb, "climb_connections"),
        instance=_setting(args, "instance")[1] or None,
        health_host=_setting(args, "health_host")[1],
        health_port=None if health_port < 0 else health_port,
    )


def _setting(args: Namespace, name: str) -> tuple[str, str]:
    """Return where a setting stands, for the sentence if it is wrong, and what it is: the option, else ``[delay]``."""
    from airflow.sdk.configuration import conf

    given: str | None = getattr(args, name)
    if given is not None:
        return name.replace("_", "-"), given
    key = name if name == "retention_days" else f"dispatcher_{name}"
    return f"[delay] {key}", conf.get("delay", key)


def _connections(given: list[str] | None, key: str) -> tuple[str, ...]:
    from airflow.sdk.configuration import conf

    names = given or conf.get("delay", key).split(",")
    return tuple(name for name in (each.strip() for each in names) if name)


def _parse_port(name: str, text: str) -> int:
    try:
        port = int(text)
    except ValueError:
        port = -2
    if not -1 <= port <= 65_535:
        raise InvalidMessageError(name, f"{text!r} is not a port", "use 0 (any free one) to 65535, or -1 for none")
    return port
