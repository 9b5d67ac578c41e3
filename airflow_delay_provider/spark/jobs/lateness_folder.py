"""The output folder of the lateness job: entries by run, figures by day, the report, and the state that ties them.

A run writes its entries to a folder of its own, which counts only once the state names it. So a run that dies leaves
nothing behind that the next one would read, and the next one reads the same entries of the journals again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from pyarrow import ArrowInvalid, fs

from airflow_delay_provider.domain.exceptions import ConfigurationError, DelayError

STATE = "state.json"
ENTRIES = "journal"
#: Figures by hour, how often each lateness occurred, and reasons of messages that did not arrive.
HOURLY, FREQUENCIES, REASONS = "hourly", "lateness", "reasons"
FIGURES = (HOURLY, FREQUENCIES, REASONS)
_VERSION = 1


class ChangedStateError(DelayError):
    """Another run has written to the folder at the same time."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The entries that one run has read."""

    id: str
    entries: int
    days: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FolderState:
    """What was read, and up to where."""

    runs: tuple[Run, ...] = ()
    #: The position behind the last entry that was read, by connection.
    positions: Mapping[str, str] = field(default_factory=dict)
    #: The lateness limit with which the hourly figures were computed.
    slo_seconds: float | None = None

    @property
    def days(self) -> list[str]:
        """All days with entries."""
        return sorted({day for run in self.runs for day in run.days})

    def to_text(self) -> str:
        """Return it as JSON."""
        runs = [{"id": run.id, "entries": run.entries, "days": list(run.days)} for run in self.runs]
        content = {
            "version": _VERSION,
            "slo_seconds": self.slo_seconds,
            "positions": dict(self.positions),
            "runs": runs,
        }
        return json.dumps(content, indent=2) + "\n"

    @classmethod
    def parse(cls, text: str, where: str) -> FolderState:
        """Undo ``to_text``."""
        try:
            content = json.loads(text)
            if content["version"] != _VERSION:
                raise ValueError("version")
            return cls(
                runs=tuple(
                    Run(id=str(run["id"]), entries=int(run["entries"]), days=tuple(run["days"]))
                    for run in content["runs"]
                ),
                positions={str(name): str(position) for name, position in content["positions"].items()},
                slo_seconds=content["slo_seconds"],
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigurationError(
                f"output: {where} was not written by this version of the job; use another folder"
            ) from None


class ReportFolder:
    """A folder on any file system that Arrow and Spark both reach."""

    def __init__(self, place: str) -> None:
        self.uri = place.rstrip("/") if "://" in place else Path(place).absolute().as_uri()
        try:
            self._fs, self._path = fs.FileSystem.from_uri(self.uri)
        except (ArrowInvalid, OSError) as error:
            raise ConfigurationError(f"output: {self.uri} cannot be opened ({error}); name a folder") from None

    def at(self, *parts: str) -> str:
        """Return the URI of something in the folder, as Spark takes it."""
        return "/".join((self.uri, *parts))

    def run(self, run_id: str) -> str:
        """Return the URI of the entries of one run."""
        return self.at(ENTRIES, f"run={run_id}")

    def read_state(self) -> FolderState:
        """Return the state; that of a new folder is empty."""
        text = self._read(STATE)
        return FolderState() if text is None else FolderState.parse(text, self.at(STATE))

    def commit(self, state: FolderState, *, before: FolderState) -> None:
        """Replace the state at once; from then on the run counts."""
        if self.read_state() != before:
            raise ChangedStateError(
                f"output: another run has written to {self.uri} at the same time; run one at a time"
                " (max_active_runs=1), then run this one again: it loses nothing"
            )
        self.write(STATE, state.to_text().encode())

    def write(self, name: str, content: bytes) -> None:
        """Write a file that readers see whole or not at all."""
        target = f"{self._path}/{name}"
        self._fs.create_dir(target.rpartition("/")[0], recursive=True)
        draft = f"{target}.{uuid4().hex}"
        with self._fs.open_output_stream(draft) as stream:
            stream.write(content)
        self._fs.move(draft, target)

    def remove_other_runs(self, state: FolderState) -> list[str]:
        """Delete the entries of runs that the state does not name: they failed, or were replaced."""
        known = {f"run={run.id}" for run in state.runs}
        others = [name for name in self._folders(ENTRIES) if name.startswith("run=") and name not in known]
        for name in others:
            self._fs.delete_dir(f"{self._path}/{ENTRIES}/{name}")
        return others

    def remove_other_days(self, state: FolderState) -> None:
        """Delete figures of days without entries."""
        known = {f"day={day}" for day in state.days}
        for kind in FIGURES:
            for name in self._folders(kind):
                if name.startswith("day=") and name not in known:
                    self._fs.delete_dir(f"{self._path}/{kind}/{name}")

    def entries_of(self, state: FolderState, days: Iterable[str]) -> list[str]:
        """Return the folders with the entries of these days."""
        wanted = set(days)
        return [f"{self.run(run.id)}/day={day}" for run in state.runs for day in run.days if day in wanted]

    def _folders(self, name: str) -> list[str]:
        found = self._fs.get_file_info(fs.FileSelector(f"{self._path}/{name}", allow_not_found=True))
        return sorted(each.base_name for each in found if each.type is fs.FileType.Directory)

    def _read(self, name: str) -> str | None:
        try:
            with self._fs.open_input_stream(f"{self._path}/{name}") as stream:
                content: bytes = stream.read()
        except FileNotFoundError:
            return None
        return content.decode()
