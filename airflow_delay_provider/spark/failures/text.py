"""Lines of a log: their level, their text without the prefix, structured ones unfolded, secrets masked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Longer lines keep their beginning and their end; every pattern therefore sees a bounded text.
MAX_LINE = 4000
#: What is read of one exception, its further lines included.
MAX_STATEMENT = 1500
#: What a line for people may take.
MAX_SHOWN = 300
#: A structured line may carry a whole stack trace; beyond this it is cut like any other line.
_MAX_JSON = 1_000_000

#: What Airflow and container runtimes put before each line.
_TRANSPORT = re.compile(
    r"^(?:\[\d{4}-\d\d-\d\d[T ][^\]]{8,40}\] \{{1,2}[^}]{1,200}\}{1,2} [A-Z]{4,8} -(?: |$)"
    r"|\[\d{4}-\d\d-\d\dT[\d:.,]{8,20}Z?\] "
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.,]?\d{0,9}(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?)"
)
_RECORD = re.compile(
    r"^(?:\[?(?:\d{2,4}[-/]\d\d[-/]\d{2,4}[T ])?\d\d:\d\d:\d\d\S{0,12}(?: UTC| [+-]\d{4})?\s+(?:- )?"
    r"(?:\[[^\]]{0,200}\]\s+)?(?:\S{1,100}\s+(?:- )?)?)?"
    r"(?P<level>TRACE|DEBUG|INFO|WARN|WARNING|ERROR|FATAL|CRITICAL|SEVERE)\b(?P<text>.*)$",
    re.DOTALL,
)
#: A time that something put before a line that begins no record.
_STAMP = re.compile(r"^\[?\d{2,4}[-/]\d\d[-/]\d{2,4}[T ]\d\d:\d\d:\d\d[.,\d]{0,10}\]? ")
_NAME = re.compile(r"`[^`\n]{1,200}`")
#: Data that a message quotes.
_VALUE = re.compile(
    r"(?i)((?:\b|_)(?:value|string|column|field|key|label|literal|near|row|attribute)s?[:=]? {0,2}| = (?='))"
    r"(?:'[^'\n]{1,200}'|\"[^\"\n]{1,200}\")"
)
#: Places of data: what their folders are called says nothing.
_PLACE = re.compile(
    r"\b((?:s3[an]?|gs|abfss?|wasbs?|hdfs|viewfs|dbfs|oss|file):/{1,3})[^\s:'\",()]{1,1000}"
    r"|(?<![\w:/.])(?<!url: )/(?:[\w.=+\-]{1,200}/){1,40}[\w.=+\-]{0,200}"
)
_SECRETS = (
    (re.compile(r"(://[^/\s:@]{1,200}:)[^@\s/]{1,500}(@)"), r"\1***\2"),
    (
        re.compile(
            r"(?i)((?:password|passwd|pwd|secret|token|credential|api[_-]?key|access[_-]?key|account[._-]?key|signature|sig)"
            r"(?!\w{0,60}(?:Error|Exception))[\w.\-]{0,60}[\"']?\s{0,3}[=:]\s{0,3}[\"']?)[^\s\"'&;,)]{1,500}"
        ),
        r"\1***",
    ),
    (re.compile(r"(?i)(bearer |basic )[\w.~+/=\-]{8,4000}"), r"\1***"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,32}\b"), "***"),
)


@dataclass(frozen=True, slots=True)
class Record:
    """One line: ``level`` is empty where the line starts no log record."""

    level: str
    text: str


def cut(line: str, limit: int = MAX_LINE) -> str:
    """Shorten in the middle: what went wrong stands at the beginning or at the end."""
    if len(line) <= limit:
        return line
    tail = limit // 4
    return f"{line[: limit - tail - 5]} ... {line[-tail:]}"


def shown(text: str) -> str:
    """Return the text for people: one line, short, without secrets."""
    line = " ".join(cut(text).split())
    for pattern, replacement in _SECRETS:
        line = pattern.sub(replacement, line)
    return cut(line, MAX_SHOWN)


def without_names(text: str) -> str:
    """Leave out what stands in backticks: a column may be called `connection refused`."""
    return _NAME.sub("``", text)


def without_data(text: str) -> str:
    """Leave out quoted values and places: a value may be 'connection refused', a folder ``timed-out``."""
    return _PLACE.sub(r"\1/", _VALUE.sub(r"\1''", text))


def record(line: str) -> Record:
    """Tell the level from the text; a line that begins no record is its own text."""
    line = _TRANSPORT.sub("", line).rstrip()
    found = _RECORD.match(line)
    if found is None:
        return Record("", _STAMP.sub("", line))
    return Record(found.group("level"), found.group("text").strip(" :-"))


def unfolded(line: str) -> Iterator[str]:
    """Yield the line, bounded; a structured (JSON) log record as the lines of the text log it stands for."""
    if line.startswith("{") and len(line) <= _MAX_JSON:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if isinstance(entry, dict) and "msg" in entry:
            yield from map(cut, _text_of(entry))
            return
    yield cut(line)


def _text_of(entry: dict[str, Any]) -> Iterator[str]:
    message, *more = str(entry["msg"]).splitlines() or [""]
    yield f"{entry.get('ts', '')} {entry.get('level', 'INFO')} {entry.get('logger', '')}: {message}".lstrip()
    yield from more
    exception = entry.get("exception")
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
