"""Lines of a log: parsed, shortened, secrets masked, and a bounded window of an unbounded log."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from airflow_delay_provider.spark.failures import patterns

#: Longer lines keep their beginning and their end; every pattern therefore sees a bounded text.
MAX_LINE = 4000
#: Of one exception, its further lines included.
MAX_STATEMENT = 1500
#: Of a line that is displayed.
MAX_DISPLAYED = 300
#: A structured line may carry a whole stack trace; a longer one is cut like any other line.
_MAX_JSON = 1_000_000

#: How many lines of each kind a window keeps.
_LAST = 200
_AFTER_FIRST_ERROR = 40
_EARLY_DECISIVE = 100
_LATE_DECISIVE = 400

Numbered = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Record:
    """One line: ``level`` is empty if the line begins no log record."""

    level: str
    text: str


def parse_record(line: str) -> Record:
    """Separate the level from the text."""
    line = patterns.TRANSPORT.sub("", line).rstrip()
    found = patterns.RECORD.match(line)
    if found is None:
        return Record("", patterns.TIMESTAMP.sub("", line))
    return Record(found.group("level"), found.group("text").strip(" :-"))


def cut(line: str, limit: int = MAX_LINE) -> str:
    """Shorten in the middle: the reason of a failure stands at the beginning or at the end."""
    if len(line) <= limit:
        return line
    tail = limit // 4
    return f"{line[: limit - tail - 5]} ... {line[-tail:]}"


def display_line(text: str) -> str:
    """Return the text for people: one line, short, without secrets."""
    line = " ".join(cut(text).split())
    for pattern, replacement in patterns.SECRETS:
        line = pattern.sub(replacement, line)
    return cut(line, MAX_DISPLAYED)


def without_names(text: str) -> str:
    """Remove names in backticks: a column may be called `connection refused`."""
    return patterns.NAME.sub("``", text)


def without_data(text: str) -> str:
    """Remove quoted values and paths: a value may be 'connection refused', a folder ``timed-out``."""
    return patterns.DATA_PATH.sub(r"\1/", patterns.QUOTED_VALUE.sub(r"\1''", text))


def expand_json(line: str) -> Iterator[str]:
    """Yield the line, shortened; a structured (JSON) log record as the lines of the equivalent text log."""
    if line.startswith("{") and len(line) <= _MAX_JSON:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if isinstance(fields, dict) and "msg" in fields:
            yield from map(cut, _lines_of(fields))
            return
    yield cut(line)


def _lines_of(fields: dict[str, Any]) -> Iterator[str]:
    message, *more = str(fields["msg"]).splitlines() or [""]
    yield f"{fields.get('ts', '')} {fields.get('level', 'INFO')} {fields.get('logger', '')}: {message}".lstrip()
    yield from more
    exception = fields.get("exception")
    if isinstance(exception, dict):
        yield from f"{exception.get('class', '')}: {exception.get('msg', '')}".splitlines()
        yield from _frames(exception.get("stacktrace"))


def _frames(stacktrace: object) -> Iterator[str]:
    if isinstance(stacktrace, str):
        yield from stacktrace.splitlines()
    elif isinstance(stacktrace, list):
        for frame in stacktrace:
            if isinstance(frame, dict):
                yield f"\tat {frame.get('class', '')}.{frame.get('method', '')}"


class Traceback:
    """Follows a Python traceback down to the name of its exception, which may be any name."""

    def __init__(self) -> None:
        self.is_open = False
        self._code_follows = False

    def begin(self) -> None:
        self.is_open, self._code_follows = True, False

    def ends_with(self, line: str) -> bool:
        """Tell whether the line names the exception; frames may have lost their indentation."""
        if not line[:1].strip(" ^~") or line.startswith('File "'):
            self._code_follows = line.startswith('File "')
            return False
        if self._code_follows and not patterns.EXCEPTION.match(line):
            self._code_follows = False
            return False
        self.is_open = False
        return True


class OutputWindow:
    """Keeps the first error with the lines after it, every decisive line of the whole stream, and the last lines.

    Decisive lines beyond the first 100 push out the oldest of the other 400, so memory stays bounded by lines and by
    their length. Structured records are kept as text lines.
    """

    def __init__(self) -> None:
        self._count = 0
        self._first: list[Numbered] = []
        self._early: list[Numbered] = []
        self._late: deque[Numbered] = deque(maxlen=_LATE_DECISIVE)
        self._last: deque[Numbered] = deque(maxlen=_LAST)
        self._traceback = Traceback()

    def feed(self, line: str) -> None:
        """Take one line of the stream."""
        for part in expand_json(line.rstrip("\r\n")):
            for physical in part.splitlines() or [""]:
                self._keep(cut(physical))

    def lines(self) -> list[str]:
        """Return the kept lines in order; gaps say how many lines are missing."""
        kept = sorted({*self._first, *self._early, *self._late, *self._last})
        result: list[str] = []
        expected = 0
        for number, line in kept:
            if number > expected:
                result.append(f"... {number - expected} lines left out ...")
            result.append(line)
            expected = number + 1
        return result

    def _keep(self, line: str) -> None:
        numbered = (self._count, line)
        self._count += 1
        self._last.append(numbered)
        matters = self._belongs_to_traceback(line) or _is_decisive(line)
        if len(self._first) < _AFTER_FIRST_ERROR and (matters or self._first):
            self._first.append(numbered)
        elif matters:
            if len(self._early) < _EARLY_DECISIVE:
                self._early.append(numbered)
            else:
                self._late.append(numbered)

    def _belongs_to_traceback(self, line: str) -> bool:
        """Python names its exception last, and the name may be any."""
        if line.rstrip().endswith(patterns.TRACEBACK):
            self._traceback.begin()
            return True
        return self._traceback.is_open and self._traceback.ends_with(line)


def _is_decisive(line: str) -> bool:
    """Tell whether the line alone may matter: an error record, an exception, a cause, an error class."""
    parsed = parse_record(line)
    level, text = parsed.level, parsed.text
    if level:
        return level in patterns.ERROR_LEVELS or (level.startswith("WARN") and bool(patterns.TROUBLE.search(text)))
    return bool(
        patterns.EXCEPTION.match(text)
        or patterns.LAUNCHER.match(text)
        or patterns.STATEMENT.match(text)
        or text.endswith(patterns.TRACEBACK)
        or "SQLSTATE: " in text
        or text.strip() in {patterns.DIRECT_CAUSE, patterns.WHILE_HANDLING}
    )
