"""What a driver says that a standalone cluster runs, fetched from the pages of the worker that runs it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import requests

#: Who asks has a job to watch or a failure to report, and does not wait long for more about it.
TIMEOUT_SECONDS = 3.0
#: Workers give no more at once.
MOST_BYTES = 1024 * 1024
#: The first line of an answer.
RANGE = re.compile(rb"==== Bytes \d+-(?P<end>\d+) of (?P<size>\d+) of .* ====\n")


class DriverLog:
    """The log of one driver, read on from where it was left.

    :param master_uis: base URLs of the pages of each master, of which one knows the driver.
    """

    def __init__(self, master_uis: Iterable[str], driver_id: str) -> None:
        self._master_uis = list(master_uis)
        self._driver_id = driver_id
        self._worker_ui = ""
        self._streams = (Stream("stdout"), Stream("stderr"))

    def read_on(self) -> Iterator[str]:
        """Yield the lines that were written since, of a long log no more than the last ones at first.

        It ends early where master or worker cannot be asked, or do not know the driver any more.
        """
        self._worker_ui = self._worker_ui or self._find_worker_ui()
        if not self._worker_ui:
            return
        for stream in self._streams:
            more = True
            while more:
                answer = _get(f"{self._worker_ui}/log/", driverId=self._driver_id, **stream.wanted())
                if answer is None:
                    return
                lines, more = stream.take(answer.content)
                yield from lines

    def _find_worker_ui(self) -> str:
        for master_ui in self._master_uis:
            # Somebody else may serve there, as the port is guessed where nobody told it.
            with suppress(ValueError, LookupError, TypeError):
                if (answer := _get(f"{master_ui}/json/")) is not None:
                    return _worker_ui_of(answer.json(), self._driver_id)
        return ""


class Stream:
    """One of the two files of a log."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._end: int | None = None
        self._begun_line = b""

    def wanted(self) -> dict[str, Any]:
        """What to ask the worker for."""
        offset = {} if self._end is None else {"offset": self._end}
        return {"logType": self._name, "byteLength": MOST_BYTES, **offset}

    def take(self, answer: bytes) -> tuple[list[str], bool]:
        """Return the lines that the answer completes, and whether there is more to ask for."""
        told = RANGE.match(answer)
        if told is None:
            return [], False
        before, self._end = self._end, int(told["end"])
        *lines, self._begun_line = (self._begun_line + answer[told.end() :]).split(b"\n")
        more = self._end < int(told["size"]) and self._end != before
        return [line.decode(errors="replace") for line in lines], more


def _worker_ui_of(master: dict[str, Any], driver_id: str) -> str:
    drivers = {each["id"]: each for each in (*master["activedrivers"], *master["completeddrivers"])}
    workers = {each["id"]: each for each in master["workers"]}
    return str(workers[drivers[driver_id]["worker"]]["webuiaddress"])


def _get(url: str, **parameters: Any) -> requests.Response | None:
    try:
        answer = requests.get(url, params=parameters, timeout=TIMEOUT_SECONDS)
    except requests.RequestException:
        return None
    return answer if answer.ok else None
