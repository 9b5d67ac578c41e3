"""Read the log of a driver on a standalone cluster from the web UI of its worker."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import requests

#: Short, because the caller has a job to watch or a failure to report.
TIMEOUT_SECONDS = 3.0
#: Workers return no more at once.
MAX_BYTES = 1024 * 1024
#: The first line of a response.
RANGE = re.compile(rb"==== Bytes \d+-(?P<end>\d+) of (?P<size>\d+) of .* ====\n")


class DriverLog:
    """The log of one driver, read from where the last read stopped.

    :param master_uis: base URLs of the web UIs of the masters, one of which knows the driver.
    """

    def __init__(self, master_uis: Iterable[str], driver_id: str) -> None:
        self._master_uis = list(master_uis)
        self._driver_id = driver_id
        self._worker_ui = ""
        self._streams = (Stream("stdout"), Stream("stderr"))

    def new_lines(self) -> Iterator[str]:
        """Yield the lines written since the last call; of a long log only the last lines at first.

        It stops early if master or worker cannot be reached, or no longer know the driver.
        """
        self._worker_ui = self._worker_ui or self._find_worker_ui()
        if not self._worker_ui:
            return
        for stream in self._streams:
            more = True
            while more:
                response = _get(f"{self._worker_ui}/log/", driverId=self._driver_id, **stream.parameters())
                if response is None:
                    return
                lines, more = stream.take(response.content)
                yield from lines

    def _find_worker_ui(self) -> str:
        for master_ui in self._master_uis:
            # Another server may listen there, because the port is a guess unless the connection has it.
            with suppress(ValueError, LookupError, TypeError):
                if (response := _get(f"{master_ui}/json/")) is not None:
                    return _worker_ui_of(response.json(), self._driver_id)
        return ""


class Stream:
    """One of the two files of a log."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._end: int | None = None
        self._unfinished_line = b""

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the next request to the worker."""
        offset = {} if self._end is None else {"offset": self._end}
        return {"logType": self._name, "byteLength": MAX_BYTES, **offset}

    def take(self, content: bytes) -> tuple[list[str], bool]:
        """Return the lines that the response completes, and whether there are more to request."""
        header = RANGE.match(content)
        if header is None:
            return [], False
        before, self._end = self._end, int(header["end"])
        *lines, self._unfinished_line = (self._unfinished_line + content[header.end() :]).split(b"\n")
        more = self._end < int(header["size"]) and self._end != before
        return [line.decode(errors="replace") for line in lines], more


def _worker_ui_of(master: dict[str, Any], driver_id: str) -> str:
    drivers = {each["id"]: each for each in (*master["activedrivers"], *master["completeddrivers"])}
    workers = {each["id"]: each for each in master["workers"]}
    return str(workers[drivers[driver_id]["worker"]]["webuiaddress"])


def _get(url: str, **parameters: Any) -> requests.Response | None:
    try:
        response = requests.get(url, params=parameters, timeout=TIMEOUT_SECONDS)
    except requests.RequestException:
        return None
    return response if response.ok else None
