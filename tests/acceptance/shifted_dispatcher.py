"""A dispatcher whose clock is wrong: ``shifted_dispatcher.py LEDGER_URL SECONDS``."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.hooks.delay import open_destination


class ShiftedClock:
    """Is ahead of the clock of this machine."""

    def __init__(self, ahead: timedelta) -> None:
        self._ahead = ahead

    def now(self) -> datetime:
        return SystemClock().now() + self._ahead


if __name__ == "__main__":
    clock = ShiftedClock(timedelta(seconds=float(sys.argv[2])))
    config = DispatcherConfig(health_port=None)
    Dispatcher(Ledger(sys.argv[1]), open_broker=open_destination, config=config, clock=clock).run_until_signalled()
