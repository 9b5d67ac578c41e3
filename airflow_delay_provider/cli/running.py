"""`airflow delay dispatcher`: the service that hands due messages to their channels."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from airflow_delay_provider.cli.exit_codes import ExitCode, command
from airflow_delay_provider.cli.opening import connections_of_the_server, open_ledger
from airflow_delay_provider.cli.options import parse_count, parse_number
from airflow_delay_provider.exceptions import InvalidMessageError

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

    given = {
        "batch": None if args.batch is None else parse_count("batch", args.batch),
        "poll_interval": None
        if args.poll_interval is None
        else timedelta(seconds=parse_number("poll-interval", args.poll_interval)),
        "rate_limit": None if args.rate_limit is None else parse_number("rate-limit", args.rate_limit),
        "health_host": args.health_host,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if args.health_port is not None:
        options["health_port"] = _parse_port(args.health_port)
    return DispatcherConfig(**options)


def _parse_port(text: str) -> int | None:
    if text == "none":
        return None
    if not text.isdecimal() or int(text) > 65_535:
        raise InvalidMessageError("health-port", f"{text!r} is not a port", "use 0 (any free one) to 65535, or none")
    return int(text)


def _open_broker(conn_id: str) -> Broker:
    from airflow_delay_provider.hooks.delay import DelayHook

    return DelayHook(conn_id).get_conn()
