"""Reading a log: which failures it tells of, and what each says, its root first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from airflow_delay_provider.spark.failures.text import MAX_STATEMENT, Record, cut, record, unfolded

#: How many further lines of a message are read; plans and rows may follow it for pages.
_MESSAGE_LINES = 12
#: How many statements of one failure are kept, half of them next to its root.
_STATEMENTS = 24
#: How many of the last lines are taken for a reason where a log tells of no failure, and how far back they may be.
_REMARKS, _LOOK_BACK = 5, 40

_TRACEBACK = "Traceback (most recent call last):"
_DIRECT_CAUSE = "The above exception was the direct cause of the following exception:"
_WHILE_HANDLING = "During handling of the above exception, another exception occurred:"
#: The line before a traceback that belongs to the exception above it.
_WORKER_TRACEBACK = re.compile(r"from the Python worker|stack trace below\.$")

_UNCAUGHT = re.compile(r'^Exception in thread "|^Uncaught exception|^Unhandled exception')
_EXCEPTION = re.compile(
    r'^(?:\s{0,8}Caused by: |: |\s{0,8}Suppressed: |Exception in thread "[^"]{0,200}" )?'
    r"(?:[A-Za-z_$][\w$]{0,100}\.){0,20}[A-Z_][\w$]{0,100}"
    r"(?:Error|Exception|Throwable|Failure|Interrupt|Fault|Timeout|Exit|Refused|Denied|NotFound|Warning)(?=[:\s(]|$)"
    r"|^\s{0,8}Caused by: \S"
)
_NAMES_EXCEPTION = re.compile(r"Traceback \(most|[a-z](?:Error|Exception)\b")
#: Records of what ended an application; other errors may be logged after them.
_ENDING = re.compile(
    r"User class threw exception|: Uncaught exception: |Error initializing SparkContext|Exception from cluster"
)
#: Said by launchers, shells and interpreters, which belong to no log record.
_LAUNCHER = re.compile(
    r"^(?:Error:(?: |$)|fatal:|# A fatal error|# There is insufficient memory|# java\.lang\.|Killed\b"
    r"|Segmentation fault|Aborted\b|Could not find valid SPARK_HOME|Unrecognized |Invalid (?:initial|maximum) heap)"
    r"|^\S{1,200}: (?:error: |line \d{1,6}: |can't open file|command not found|No such file|Permission denied|cannot )"
)
#: Said outside of any stack trace, mostly by resource managers.
_STATEMENT = re.compile(
    r"^\s{0,8}(?:[Ee]rror occurred|diagnostics: (?!N/A|\[?AM container is launched)|[Tt]ermination (?:reason|message): "
    r"|exit code: |User class threw exception|User application exited|Server access error|Exit status: |Diagnostics: "
    r"|Container (?:killed|exited|released|marked|is running|\[pid)|Failing this attempt"
    r"|Application \S{1,60} (?:failed|was killed|is killed))"
    r"|^\[[A-Z][A-Z0-9_.]{3,200}\] "
)
_FRAME = re.compile(
    r"^[\s|]{0,12}at \S|^\s{0,12}\.{3} \d{1,6} more|^\s{0,8}File \"|^\s*$|^Driver stacktrace:"
    r"|^\.\.\. \d{1,12} lines left out"
)
_TROUBLE = re.compile(r"(?i)exception|error|lost |fail|refused|timed out|killed|unresponsive|not accepted")
_PLAN = re.compile(r"^\s*(?:[+:]-|:  |'[A-Z]|==|\||\^)")
#: A job that succeeds later shows that what failed before did not end the application.
_JOB_DONE = re.compile(r"^DAGScheduler: Job \d{1,9} finished")
_ERRORS = frozenset({"ERROR", "FATAL", "CRITICAL", "SEVERE"})


@dataclass(slots=True)
class Failure:
    """One failure of a log: what it says, the root of its causes first."""

    #: It ended a thread or the driver, as far as the log shows.
    uncaught: bool = False
    #: The log called it a warning or less: the application may have survived it.
    survivable: bool = False
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
    remarks = [one.strip() for one in last if not (_FRAME.match(one) or _EXCEPTION.match(one))]
    return [Failure(statements=[cut("\n".join(remarks[-_REMARKS:]), MAX_STATEMENT)])] if remarks else []


def last_failure_first(found: list[Failure]) -> list[Failure]:
    """Order by weight: what ended the driver, then what went before it (latest first), then what was survived."""
    ending = next((one for one in reversed(found) if one.uncaught and not one.survivable), None)
    rest = [one for one in reversed(found) if one is not ending]
    ordered = [one for one in rest if not one.survivable] + [one for one in rest if one.survivable]
    return [ending, *ordered] if ending else ordered


class Traceback:
    """Follows a traceback down to the name of its exception, which may be any."""

    def __init__(self) -> None:
        self.is_open = False
        self._code_follows = False

    def begin(self) -> None:
        self.is_open, self._code_follows = True, False

    def ends_with(self, line: str) -> bool:
        """Tell whether the line names the exception; frames may have lost their indentation on the way."""
        if not line[:1].strip(" ^~") or line.startswith('File "'):
            self._code_follows = line.startswith('File "')
            return False
        if self._code_follows and not _EXCEPTION.match(line):
            self._code_follows = False
            return False
        self.is_open = False
        return True


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
        if self._traceback.is_open and entry.level not in _ERRORS:
            return
        self._close()
        if _JOB_DONE.search(entry.text):
            self._survived_so_far()
        elif entry.level in _ERRORS:
            self._start(Failure(uncaught=bool(_ENDING.search(entry.text))))
            self._say(entry.text)
        elif entry.level in {"WARN", "WARNING"} or _NAMES_EXCEPTION.search(entry.text):
            self._start(Failure(survivable=True))
            self._say(entry.text)
        if entry.text.endswith(_TRACEBACK):
            self._traceback.begin()

    def _survived_so_far(self) -> None:
        for failure in self._found:
            failure.survivable = True

    def _continue(self, text: str) -> None:
        stripped = text.strip()
        if stripped in {_DIRECT_CAUSE, _WHILE_HANDLING}:
            self._link = stripped == _DIRECT_CAUSE
        elif stripped == _TRACEBACK:
            self._begin_traceback(text)
        elif text.endswith(_TRACEBACK):
            self._join(text)
            self._traceback.begin()
        elif self._traceback.is_open:
            if self._traceback.ends_with(text):
                self._say(text)
        elif text.startswith(('  File "', 'File "')):  # Python reports what it cannot parse without a heading
            self._start(Failure(uncaught=True))
            self._traceback.begin()
            self._traceback.ends_with(text)
        elif _UNCAUGHT.match(text):
            self._start(Failure(uncaught=True))
            self._say(text)
        elif _EXCEPTION.match(text):
            self._join(text)
        elif _LAUNCHER.match(text):
            if self._open is None or self._open.survivable:
                self._start(Failure())
            self._say(text)
        elif _STATEMENT.match(text):
            self._join(text)
        else:
            self._more_of_the_message(text)

    def _begin_traceback(self, text: str) -> None:
        if self._link is not None and self._open is not None:
            self._earlier.append((self._link, self._chain))
            self._chain = []
            self._link = None
        elif self._open is None or not (text[:1].isspace() or _WORKER_TRACEBACK.search(self._last_line)):
            self._start(Failure(uncaught=True))
        self._traceback.begin()

    def _join(self, text: str) -> None:
        if self._open is None:
            self._start(Failure())
        self._say(text)

    def _more_of_the_message(self, text: str) -> None:
        if self._chain and self._room and not _FRAME.match(text) and not _PLAN.match(text):
            self._chain[-1] = cut(f"{self._chain[-1]}\n{text.strip()}", MAX_STATEMENT)
            self._room -= 1
        elif _FRAME.match(text) and text.strip():
            self._room = 0

    def _say(self, text: str) -> None:
        self._chain.append(cut(text.strip(), MAX_STATEMENT))
        self._room = _MESSAGE_LINES

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


def names_exception(statement: str) -> bool:
    """Tell whether the statement is an exception, and not just a remark."""
    return bool(_EXCEPTION.match(statement) or _NAMES_EXCEPTION.search(statement))


def decisive(line: str) -> bool:
    """Tell whether the line alone may matter: an error record, an exception, a cause, an error class."""
    entry = record(line)
    if entry.level:
        return entry.level in _ERRORS or (entry.level.startswith("WARN") and bool(_TROUBLE.search(entry.text)))
    text = entry.text
    return bool(
        _EXCEPTION.match(text)
        or _LAUNCHER.match(text)
        or _STATEMENT.match(text)
        or text.endswith(_TRACEBACK)
        or "SQLSTATE: " in text
        or text.strip() in {_DIRECT_CAUSE, _WHILE_HANDLING}
    )


def opens_traceback(line: str) -> bool:
    """Tell whether Python frames follow, and after them the name of the exception."""
    return line.rstrip().endswith(_TRACEBACK)
