"""What a driver said that a standalone cluster ran, fetched from the pages of the worker that ran it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import requests

#: Who asks is a task that has failed already; it does not wait long for the reason.
TIMEOUT_SECONDS = 3.0
#: Workers give no more at once.
LAST_BYTES = 1024 * 1024


def read_driver_log(master_ui: str, driver_id: str) -> Iterator[str]:
    """Yield the last lines of standard output, then of standard error.

    :raises LookupError: the master or the worker does not know the driver any more.
    :raises requests.RequestException: it cannot be asked.
    """
    worker_ui = _find_worker_ui(_get(f"{master_ui}/json/").json(), driver_id)
    for log_type in ("stdout", "stderr"):
        wanted = {"driverId": driver_id, "logType": log_type, "byteLength": LAST_BYTES}
        # The first line tells which bytes they are.
        yield from _get(f"{worker_ui}/log/", **wanted).text.splitlines()[1:]


def _find_worker_ui(master: dict[str, Any], driver_id: str) -> str:
    drivers = {each["id"]: each for each in [*master["activedrivers"], *master["completeddrivers"]]}
    workers = {each["id"]: each for each in master["workers"]}
    return str(workers[drivers[driver_id]["worker"]]["webuiaddress"])


def _get(url: str, **parameters: Any) -> requests.Response:
    answer = requests.get(url, params=parameters, timeout=TIMEOUT_SECONDS)
    answer.raise_for_status()
    return answer
