"""A bounded view of an unbounded log."""

from __future__ import annotations

from collections import deque

from airflow_delay_provider.spark.failures.signs import Traceback, decisive, opens_traceback
from airflow_delay_provider.spark.failures.text import cut, unfolded

_LAST = 200
_AFTER_FIRST_ERROR = 40
_EARLY_DECISIVE = 100
_LATE_DECISIVE = 400

Numbered = tuple[int, str]


class OutputWindow:
    """Keeps the first error with what follows it, every decisive line of the whole stream, and the last lines.

    Decisive lines beyond the first 100 push out the oldest of the other 400; memory stays bounded by lines and by
    their length. Structured records are kept as the text lines they stand for.
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
        for part in unfolded(line.rstrip("\r\n")):
            for physical in part.splitlines() or [""]:
                self._keep(cut(physical))

    def lines(self) -> list[str]:
        """Return what was kept, in order; gaps say how many lines are missing."""
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
        entry = (self._count, line)
        self._count += 1
        self._last.append(entry)
        matters = self._belongs_to_traceback(line) or decisive(line)
        if len(self._first) < _AFTER_FIRST_ERROR and (matters or self._first):
            self._first.append(entry)
        elif matters:
            if len(self._early) < _EARLY_DECISIVE:
                self._early.append(entry)
            else:
                self._late.append(entry)

    def _belongs_to_traceback(self, line: str) -> bool:
        """Python names its exception last, and the name may be any."""
        if opens_traceback(line):
            self._traceback.begin()
            return True
        return self._traceback.is_open and self._traceback.ends_with(line)
