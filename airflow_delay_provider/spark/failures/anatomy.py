"""Reading a log: which failures it tells of, and what each says, its root first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from airflow_delay_provider.spark.failures.signs import (
    DIRECT_CAUSE,
    ENDING,
    ERRORS,
    EXCEPTION,
    FRAME,
    JOB_DONE,
    LAUNCHER,
    NAMES_EXCEPTION,
    PLAN,
    QUERY_FOLLOWS,
    STATEMENT,
    TRACEBACK,
    UNCAUGHT,
    WHILE_HANDLING,
    WORKER_TRACEBACK,
    Traceback,
)
from airflow_delay_provider.spark.failures.text import MAX_STATEMENT, Record, cut, record, unfolded

#: How many further lines of a message are read; plans and rows may follow it for pages.
_MESSAGE_LINES = 12
#: How many statements of one failure are kept, half of them next to its root.
_STATEMENTS = 24
#: How many of the last lines are taken for a reason where a log tells of no failure, and how far back they may be.
_REMARKS, _LOOK_BACK = 5, 40


@dataclass(slots=True)
class Failure:
    """One failure of a log: what it says, the root of its causes first."""

    #: It ended a thread or the driver, as far as the log shows.
    uncaught: bool = False
    #: The log called it a warning or less: the application may have survived it.
    survivable: bool = False
    #: A job succeeded after it.
    outlived: bool = False
    statements: list[str] = field(default_factory=list)


def failures(lines: Sequence[str]) -> list[Failure]:
    """Return the failures in the order of the log."""
    reader = _Reader()
    for line in lines:
        for part in unfolded(line):
            for physical in part.splitlines():
                reader.read(cut(physical))
    found = reader.finished()
    return found if any(not failure.survivable for failure in found) else _last_remarks(lines)


def _last_remarks(lines: Sequence[str]) -> list[Failure]:
    """Where nothing looks like a failure, what was printed last is all there is."""
    last = [one.text for one in map(record, lines[-_LOOK_BACK:]) if not one.level]
    remarks = [one.strip() for one in last if not (FRAME.match(one) or EXCEPTION.match(one))]
    return [Failure(statements=[cut("\n".join(remarks[-_REMARKS:]), MAX_STATEMENT)])] if remarks else []


def last_failure_first(found: list[Failure]) -> list[Failure]:
    """Order by weight: what ended the driver, then what went before it (latest first), then what was survived."""
    ending = next((one for one in reversed(found) if one.uncaught and not one.survivable), None)
    rest = [one for one in reversed(found) if one is not ending]
    ordered = [one for one in rest if not one.survivable] + [one for one in rest if one.survivable]
    return [ending, *ordered] if ending else ordered


class _Reader:
    """Walks down a log once and remembers the failure that it is in."""

    def __init__(self) -> None:
        self._found: list[Failure] = []
        self._open: Failure | None = None
        #: Statements of the open failure as they stand in the log, outermost first.
        self._chain: list[str] = []
        #: Statements of Python exceptions that led to the open one: (is its cause, statements).
        self._earlier: list[tuple[bool, list[str]]] = []
        self._traceback = Traceback()
        self._room = 0
        self._link: bool | None = None
        self._last_line = ""

    def read(self, line: str) -> None:
        entry = record(line)
        if entry.level:
            self._begin_record(entry)
        else:
            self._continue(entry.text)
        if entry.text.strip():
            self._last_line = entry.text

    def finished(self) -> list[Failure]:
        self._close()
        return [one for one in self._found if one.statements]

    def _begin_record(self, entry: Record) -> None:
        # Log records of other threads fall into the middle of a traceback; it goes on after them.
        if self._traceback.is_open and entry.level not in ERRORS:
            return
        self._close()
        if JOB_DONE.search(entry.text):
            self._survived_so_far()
        elif entry.level in ERRORS:
            self._start(Failure(uncaught=bool(ENDING.search(entry.text))))
            self._say(entry.text)
        elif entry.level in {"WARN", "WARNING"} or NAMES_EXCEPTION.search(entry.text):
            self._start(Failure(survivable=True))
            self._say(entry.text)
        if entry.text.endswith(TRACEBACK):
            self._traceback.begin()

    def _survived_so_far(self) -> None:
        for failure in self._found:
            failure.survivable = failure.outlived = True

    def _continue(self, text: str) -> None:
        stripped = text.strip()
        if stripped in {DIRECT_CAUSE, WHILE_HANDLING}:
            self._link = stripped == DIRECT_CAUSE
        elif stripped == TRACEBACK:
            self._begin_traceback(text)
        elif text.endswith(TRACEBACK):
            self._join(text)
            self._traceback.begin()
        elif self._traceback.is_open:
            if self._traceback.ends_with(text):
                self._say(text)
        elif text.startswith(('  File "', 'File "')):  # Python reports what it cannot parse without a heading
            self._start(Failure(uncaught=True))
            self._traceback.begin()
            self._traceback.ends_with(text)
        elif UNCAUGHT.match(text):
            self._start(Failure(uncaught=True))
            self._say(text)
        elif EXCEPTION.match(text):
            self._join(text)
        elif LAUNCHER.match(text):
            if self._open is None or self._open.survivable:
                self._start(Failure())
            self._say(text)
        elif STATEMENT.match(text):
            self._join(text)
        else:
            self._more_of_the_message(text)

    def _begin_traceback(self, text: str) -> None:
        if self._link is not None and self._open is not None:
            self._earlier.append((self._link, self._chain))
            self._chain = []
            self._link = None
        elif self._open is None or not (text[:1].isspace() or WORKER_TRACEBACK.search(self._last_line)):
            self._start(Failure(uncaught=True))
        self._traceback.begin()

    def _join(self, text: str) -> None:
        if self._open is None:
            self._start(Failure())
        self._say(text)

    def _more_of_the_message(self, text: str) -> None:
        if QUERY_FOLLOWS.search(text):
            self._room = 0
        elif self._chain and self._room and not FRAME.match(text) and not PLAN.match(text):
            self._chain[-1] = cut(f"{self._chain[-1]}\n{text.strip()}", MAX_STATEMENT)
            self._room -= 1
        elif FRAME.match(text) and text.strip():
            self._room = 0

    def _say(self, text: str) -> None:
        self._chain.append(cut(text.strip(), MAX_STATEMENT))
        self._room = 0 if QUERY_FOLLOWS.search(text) else _MESSAGE_LINES

    def _start(self, failure: Failure) -> None:
        self._close()
        self._open = failure
        self._found.append(failure)

    def _close(self) -> None:
        if self._open is not None:
            ordered = self._root_first()
            half = _STATEMENTS // 2
            self._open.statements = ordered if len(ordered) <= _STATEMENTS else ordered[:half] + ordered[-half:]
        self._open, self._chain, self._earlier = None, [], []
        self._traceback, self._link, self._room = Traceback(), None, 0

    def _root_first(self) -> list[str]:
        """A declared cause speaks before what it caused; what was merely being handled speaks after."""
        ordered = self._chain[::-1]
        for is_cause, chain in reversed(self._earlier):
            ordered = chain[::-1] + ordered if is_cause else ordered + chain[::-1]
        return ordered
