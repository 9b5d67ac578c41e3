"""`airflow delay dispatcher`: the service that hands due messages to their channels."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from airflow_delay_provider.cli.exit_codes import ExitCode, command
from airflow_delay_provider.cli.opening import open_ledger
from airflow_delay_provider.cli.options import parse_count, parse_number
from airflow_delay_provider.exceptions import InvalidMessageError
from airflow_delay_provider.hooks.connections import connections_of_the_server

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.base import Broker
    from airflow_delay_provider.dispatcher.config import DispatcherConfig


@command
def dispatcher(args: Namespace) -> None:
    """Serve the ledger of a connection until SIGTERM or SIGINT."""
    from airflow_delay_provider.dispatcher.service import Dispatcher
    from airflow_delay_provider.metrics import connect_metrics

    config = _config_of(args)
    with open_ledger(args.conn_id) as ledger, connections_of_the_server():
        connect_metrics()
        service = Dispatcher(ledger, open_broker=_open_broker, config=config, observers=[AirflowObserver()])
        stopped_cleanly = service.run_until_signalled()
    if not stopped_cleanly:
        raise SystemExit(int(ExitCode.REFUSED))


class AirflowObserver:
    """Tells Airflow's own metrics what the dispatcher did."""

    def __init__(self) -> None:
        from airflow_delay_provider.metrics import AirflowMetrics

        self._metrics = AirflowMetrics()

    def dispatched(self, by_channel: Mapping[str, int], lateness_ms: Sequence[int]) -> None:
        """Count messages by channel, and the lateness of all."""
        for channel, count in by_channel.items():
            self._metrics.dispatched(count, channel=channel)
        self._metrics.dispatched(0, lateness_ms)

    def failed(self, loop: str) -> None:
        """Count an error."""
        self._metrics.error(loop)


def _config_of(args: Namespace) -> DispatcherConfig:
    from airflow_delay_provider.dispatcher.config import DispatcherConfig

    health_port = _parse_port(*_setting(args, "health_port"))
    return DispatcherConfig(
        batch=parse_count(*_setting(args, "batch")),
        poll_interval=timedelta(seconds=parse_number(*_setting(args, "poll_interval"))),
        # Zero is no limit.
        rate_limit=parse_number(*_setting(args, "rate_limit"), from_zero=True) or None,
        retention=timedelta(days=parse_number(*_setting(args, "retention_days"))),
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


def _parse_port(name: str, text: str) -> int:
    try:
        port = int(text)
    except ValueError:
        port = -2
    if not -1 <= port <= 65_535:
        raise InvalidMessageError(name, f"{text!r} is not a port", "use 0 (any free one) to 65535, or -1 for none")
    return port


def _open_broker(conn_id: str) -> Broker:
    from airflow_delay_provider.hooks.delay import DelayHook

    return DelayHook(conn_id).get_conn()
