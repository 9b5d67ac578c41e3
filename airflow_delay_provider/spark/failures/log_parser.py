"""Parse a log into its failures, each with its statements, the root cause first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from airflow_delay_provider.spark.failures import patterns
from airflow_delay_provider.spark.failures.log_text import (
    MAX_STATEMENT,
    Record,
    Traceback,
    cut,
    expand_json,
    parse_record,
)

#: How many further lines of a message are read; pages of plans and rows may follow it.
_MESSAGE_LINES = 12
#: How many statements of one failure are kept, half of them next to its root.
_STATEMENTS = 24
#: How many of the last lines serve as the reason if a log has no failure, and how far back they may be.
_REMARKS, _LOOK_BACK = 5, 40


@dataclass(slots=True)
class Failure:
    """One failure of a log."""

    #: It ended a thread or the driver, as far as the log shows.
    uncaught: bool = False
    #: The log calls it a warning or less: the application may have survived it.
    survivable: bool = False
    #: A job succeeded after it.
    outlived: bool = False
    #: The root cause first.
    statements: list[str] = field(default_factory=list)


def parse_failures(lines: Sequence[str]) -> list[Failure]:
    """Return the failures in the order of the log."""
    parser = _LogParser()
    for line in lines:
        for part in expand_json(line):
            for physical in part.splitlines():
                parser.read(cut(physical))
    found = parser.finish()
    return found if any(not failure.survivable for failure in found) else _last_remarks(lines)


def _last_remarks(lines: Sequence[str]) -> list[Failure]:
    """Use the last lines if nothing looks like a failure."""
    last = [one.text for one in map(parse_record, lines[-_LOOK_BACK:]) if not one.level]
    remarks = [one.strip() for one in last if not (patterns.FRAME.match(one) or patterns.EXCEPTION.match(one))]
    return [Failure(statements=[cut("\n".join(remarks[-_REMARKS:]), MAX_STATEMENT)])] if remarks else []


def order_by_weight(found: list[Failure]) -> list[Failure]:
    """Return the failure that ended the driver, then earlier ones (latest first), then those it survived."""
    ending = next((one for one in reversed(found) if one.uncaught and not one.survivable), None)
    rest = [one for one in reversed(found) if one is not ending]
    ordered = [one for one in rest if not one.survivable] + [one for one in rest if one.survivable]
    return [ending, *ordered] if ending else ordered


class _LogParser:
    """Reads a log once, line by line, and knows in which failure it is."""

    def __init__(self) -> None:
        self._found: list[Failure] = []
        self._open: Failure | None = None
        #: Statements of the open failure as they stand in the log, outermost first.
        self._chain: list[str] = []
        #: Statements of Python exceptions before the open one: (is its cause, statements).
        self._earlier: list[tuple[bool, list[str]]] = []
        self._traceback = Traceback()
        self._room = 0
        self._link: bool | None = None
        self._last_line = ""

    def read(self, line: str) -> None:
        parsed = parse_record(line)
        if parsed.level:
            self._begin_record(parsed)
        else:
            self._continue(parsed.text)
        if parsed.text.strip():
            self._last_line = parsed.text

    def finish(self) -> list[Failure]:
        self._close()
        return [one for one in self._found if one.statements]

    def _begin_record(self, parsed: Record) -> None:
        # Log records of other threads fall into the middle of a traceback; it goes on after them.
        if self._traceback.is_open and parsed.level not in patterns.ERROR_LEVELS:
            return
        self._close()
        if patterns.JOB_DONE.search(parsed.text):
            self._mark_survived()
        elif parsed.level in patterns.ERROR_LEVELS:
            self._start(Failure(uncaught=bool(patterns.ENDING.search(parsed.text))))
            self._add_statement(parsed.text)
        elif parsed.level in {"WARN", "WARNING"} or patterns.NAMES_EXCEPTION.search(parsed.text):
            self._start(Failure(survivable=True))
            self._add_statement(parsed.text)
        if parsed.text.endswith(patterns.TRACEBACK):
            self._traceback.begin()

    def _mark_survived(self) -> None:
        for failure in self._found:
            failure.survivable = failure.outlived = True

    def _continue(self, text: str) -> None:
        stripped = text.strip()
        if stripped in {patterns.DIRECT_CAUSE, patterns.WHILE_HANDLING}:
            self._link = stripped == patterns.DIRECT_CAUSE
        elif stripped == patterns.TRACEBACK:
            self._begin_traceback(text)
        elif text.endswith(patterns.TRACEBACK):
            self._add_to_open_failure(text)
            self._traceback.begin()
        elif self._traceback.is_open:
            if self._traceback.ends_with(text):
                self._add_statement(text)
        elif text.startswith(('  File "', 'File "')):  # Python reports a syntax error without a heading
            self._start(Failure(uncaught=True))
            self._traceback.begin()
            self._traceback.ends_with(text)
        elif patterns.UNCAUGHT.match(text):
            self._start(Failure(uncaught=True))
            self._add_statement(text)
        elif patterns.EXCEPTION.match(text):
            self._add_to_open_failure(text)
        elif patterns.LAUNCHER.match(text):
            if self._open is None or self._open.survivable:
                self._start(Failure())
            self._add_statement(text)
        elif patterns.STATEMENT.match(text):
            self._add_to_open_failure(text)
        else:
            self._continue_message(text)

    def _begin_traceback(self, text: str) -> None:
        if self._link is not None and self._open is not None:
            self._earlier.append((self._link, self._chain))
            self._chain = []
            self._link = None
        elif self._open is None or not (text[:1].isspace() or patterns.WORKER_TRACEBACK.search(self._last_line)):
            self._start(Failure(uncaught=True))
        self._traceback.begin()

    def _add_to_open_failure(self, text: str) -> None:
        if self._open is None:
            self._start(Failure())
        self._add_statement(text)

    def _continue_message(self, text: str) -> None:
        if patterns.QUERY_FOLLOWS.search(text):
            self._room = 0
        elif self._chain and self._room and not patterns.FRAME.match(text) and not patterns.PLAN.match(text):
            self._chain[-1] = cut(f"{self._chain[-1]}\n{text.strip()}", MAX_STATEMENT)
            self._room -= 1
        elif patterns.FRAME.match(text) and text.strip():
            self._room = 0

    def _add_statement(self, text: str) -> None:
        self._chain.append(cut(text.strip(), MAX_STATEMENT))
        self._room = 0 if patterns.QUERY_FOLLOWS.search(text) else _MESSAGE_LINES

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
        """Put a declared cause before its effect, and an exception that was merely being handled after."""
        ordered = self._chain[::-1]
        for is_cause, chain in reversed(self._earlier):
            ordered = chain[::-1] + ordered if is_cause else ordered + chain[::-1]
        return ordered
