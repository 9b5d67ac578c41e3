"""Jobs that never fail because nobody works on them: what the output of a driver tells of that, and for how long."""

from __future__ import annotations

import re

#: Spark warns every 15 s. Warnings further apart than this are of different waits.
LONGEST_GAP_SECONDS = 60.0
EVENTS = re.compile(
    r"(?P<not_accepted>Initial job has not accepted any resources)"
    r"|Registered executor .*? with ID (?P<registered>\w+)"
    r"|Lost executor (?P<lost>\w+) on "
    r"|Executor (?P<killed>\w+) on \S+ killed by driver"
    r"|Adding task set (?P<added>[\d.]+\d) "
    r"|Removed TaskSet (?P<removed>[\d.]+\d)"
)


class StarvationWatch:
    """Told of each line and each driver state when it is seen, it knows whether a job has starved.

    Without log lines of level INFO it sees Spark's warnings only: that executors were lost, but not whether others are
    left. Then it waits on rather than end a job that is worked on.

    :param timeout: after how many seconds without anybody who works.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._first_warning: float | None = None
        self._last_warning = 0.0
        self._executors: set[str] = set()
        self._had_executors = False
        self._task_sets: set[str] = set()
        self._deserted_since: float | None = None
        self._submitted_since: float | None = None

    def see(self, now: float, line: str) -> None:
        """Take in one line of a driver's output."""
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
        self._note_desertion(now)

    def see_driver(self, now: float, state: str | None) -> None:
        """Take in the state of a driver that a standalone cluster runs."""
        if state != "SUBMITTED":
            self._submitted_since = None
        elif self._submitted_since is None:
            self._submitted_since = now

    def starved(self, now: float) -> str:
        """Return in one line why the job shall be ended, or nothing; a rule of the classifier knows it by its end."""
        warned = 0.0 if self._first_warning is None else self._last_warning - self._first_warning
        deserted = 0.0 if self._deserted_since is None else now - self._deserted_since
        submitted = 0.0 if self._submitted_since is None else now - self._submitted_since
        for seconds, what in (
            (warned, "no executor accepted work"),
            (deserted, "all executors were lost and none came back"),
            (submitted, "no worker took the driver"),
        ):
            if seconds and seconds >= self._timeout:
                return f"{what} for {seconds:.0f} s (starvation watchdog)"
        return ""

    def _warn(self, now: float) -> None:
        if self._first_warning is None or now - self._last_warning > LONGEST_GAP_SECONDS:
            self._first_warning = now
        self._last_warning = now

    def _note_desertion(self, now: float) -> None:
        # Before the first one comes there is nothing to tell a cluster from local mode, which registers none.
        deserted = self._had_executors and not self._executors and bool(self._task_sets)
        if not deserted:
            self._deserted_since = None
        elif self._deserted_since is None:
            self._deserted_since = now
