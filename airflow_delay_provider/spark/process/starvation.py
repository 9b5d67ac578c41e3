"""The starvation watchdog: find jobs that hang because no executor works on them."""

from __future__ import annotations

import re

#: Spark warns every 15 s. Warnings further apart than this belong to different waits.
LONGEST_GAP_SECONDS = 60.0
EVENTS = re.compile(
    r"(?P<not_accepted>Initial job has not accepted any resources)"
    r"|Registered executor .*? with ID (?P<registered>\w+)"
    r"|Lost executor (?P<lost>\w+) on "
    r"|Executor (?P<killed>\w+) on \S+ killed by driver"
    r"|Adding task set (?P<added>[\d.]+\d) "
    r"|Removed TaskSet (?P<removed>[\d.]+\d)"
)


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
