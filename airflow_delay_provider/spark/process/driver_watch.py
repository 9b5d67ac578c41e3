"""Watch a driver: read its log from the web UI of its worker, and find out whether its job starves."""

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
#: The first line of a response of a worker.
RANGE = re.compile(rb"==== Bytes \d+-(?P<end>\d+) of (?P<size>\d+) of .* ====\n")
#: Spark warns every 15 s. Warnings further apart than this belong to different waits.
LONGEST_GAP_SECONDS = 60.0
#: Lines of a driver from which a starving job is known.
EVENTS = re.compile(
    r"(?P<not_accepted>Initial job has not accepted any resources)"
    r"|Registered executor .*? with ID (?P<registered>\w+)"
    r"|Lost executor (?P<lost>\w+) on "
    r"|Executor (?P<killed>\w+) on \S+ killed by driver"
    r"|Adding task set (?P<added>[\d.]+\d) "
    r"|Removed TaskSet (?P<removed>[\d.]+\d)"
)


class DriverLog:
    """The log of one driver on a standalone cluster, read from where the last read stopped.

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


class StarvationWatchdog:
    """Decides from the log lines and states of a driver whether its job starves.

    Without log lines of level INFO it sees only Spark's warnings: that executors were lost, but not whether others
    remain. In that case it waits, so that it never stops a job that makes progress.

    :param timeout: after how many seconds without executors a job has starved.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._first_warning: float | None = None
        self._last_warning = 0.0
        self._executors: set[str] = set()
        self._had_executors = False
        self._task_sets: set[str] = set()
        self._lost_since: float | None = None
        self._submitted_since: float | None = None

    def observe(self, now: float, line: str) -> None:
        """Take one line of a driver's output."""
        event = EVENTS.search(line)
        if event is None:
            return
        if event["not_accepted"]:
            self._warn(now)
        elif event["registered"]:
            self._executors.add(event["registered"])
            self._had_executors, self._first_warning = True, None
        elif event["added"]:
            self._task_sets.add(event["added"])
        self._executors.discard(event["lost"] or event["killed"])
        self._task_sets.discard(event["removed"])
        self._update_lost_since(now)

    def observe_driver(self, now: float, state: str | None) -> None:
        """Take the state of a driver that runs on a standalone cluster."""
        if state != "SUBMITTED":
            self._submitted_since = None
        elif self._submitted_since is None:
            self._submitted_since = now

    def starved(self, now: float) -> str:
        """Return why the job has starved, or an empty text; a rule of the classifier matches the last words."""
        warned = 0.0 if self._first_warning is None else self._last_warning - self._first_warning
        lost = 0.0 if self._lost_since is None else now - self._lost_since
        submitted = 0.0 if self._submitted_since is None else now - self._submitted_since
        for seconds, what in (
            (warned, "no executor accepted work"),
            (lost, "all executors were lost and none came back"),
            (submitted, "no worker took the driver"),
        ):
            if seconds and seconds >= self._timeout:
                return f"{what} for {seconds:.0f} s (starvation watchdog)"
        return ""

    def _warn(self, now: float) -> None:
        if self._first_warning is None or now - self._last_warning > LONGEST_GAP_SECONDS:
            self._first_warning = now
        self._last_warning = now

    def _update_lost_since(self, now: float) -> None:
        # Before the first executor registers, a cluster looks like local mode, which registers none.
        lost = self._had_executors and not self._executors and bool(self._task_sets)
        if not lost:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now
