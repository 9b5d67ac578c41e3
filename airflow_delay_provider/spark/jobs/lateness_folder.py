"""The output folder of the lateness job: entries by run, figures by day, the report, and the state that ties them.

A run writes entries and figures to folders of its own, which count only once the state names them. So a run that dies
leaves nothing behind that the next one would read, and the next one reads the same entries of the journals again. Of
two runs at the same time, the first to commit counts, and the other one is refused.

A folder is deleted only after a commit, and only if it was there before that run wrote anything: the run that wrote it
has failed, or can no longer commit. So a folder that the state names is never deleted.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from uuid import uuid4

from pyarrow import ArrowInvalid, fs

from airflow_delay_provider.domain.exceptions import ConfigurationError, DelayError

STATE = "state.json"
ENTRIES = "journal"
#: Figures by hour, how often each lateness occurred, and reasons of messages that did not arrive.
HOURLY, FREQUENCIES, REASONS = "hourly", "lateness", "reasons"
FIGURES = (HOURLY, FREQUENCIES, REASONS)
_VERSION = 2


class ChangedStateError(DelayError):
    """Another run has written to the folder at the same time."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The entries that one run has read."""

    id: str
    entries: int
    days: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Entries of a connection that may be missing, as they were deleted before a run could read them."""

    connection: str
    #: The days between which they were made.
    since: str
    until: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class FolderState:
    """What was read, and up to where."""

    runs: tuple[Run, ...] = ()
    #: The position behind the last entry that was read, by connection.
    positions: Mapping[str, str] = field(default_factory=dict)
    #: The run whose figures count, by day.
    figures: Mapping[str, str] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    #: The lateness limit with which the hourly figures were computed.
    slo_seconds: float | None = None

    @property
    def days(self) -> list[str]:
        """All days with entries."""
        return sorted({day for run in self.runs for day in run.days})

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=2) + "\n"

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
                figures={str(day): str(run) for day, run in content["figures"].items()},
                gaps=tuple(Gap(**gap) for gap in content["gaps"]),
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
        if text is not None:
            return FolderState.parse(text, self.at(STATE))
        if self.find_runs():
            raise ConfigurationError(
                f"output: {self.uri} has entries of runs, but {STATE}, which names them, is missing; restore it, or use"
                " another folder"
            )
        return FolderState()

    def begin(self) -> None:
        """Write the state of a new folder, so that what a first run leaves behind is known as this job's."""
        with self._lock():
            if self._read(STATE) is None:
                self.write(STATE, FolderState().to_text().encode())

    def commit(self, state: FolderState, *, before: FolderState) -> None:
        """Replace the state at once, if it is still what it was before; from then on the run counts."""
        with self._lock():
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

    def find_runs(self) -> set[str]:
        """Return the ids of all runs that have written entries or figures."""
        names = [name for kind in (ENTRIES, *FIGURES) for name in self._folders(kind)]
        return {name.removeprefix("run=") for name in names if name.startswith("run=")}

    def remove_unnamed(self, state: FolderState, runs: Iterable[str]) -> None:
        """Delete what these runs have written and the state does not name: they failed, or were replaced."""
        with_entries = {run.id for run in state.runs}
        for run in runs:
            if run not in with_entries:
                self._remove(f"{ENTRIES}/run={run}")
            days = {f"day={day}" for day, of_run in state.figures.items() if of_run == run}
            for folder in (f"{kind}/run={run}" for kind in FIGURES):
                replaced = [f"{folder}/{name}" for name in self._folders(folder) if name not in days]
                for name in replaced if days else [folder]:
                    self._remove(name)

    def entries_of(self, state: FolderState, days: Iterable[str]) -> list[str]:
        """Return the folders with the entries of these days."""
        wanted = set(days)
        return [f"{self.run(run.id)}/day={day}" for run in state.runs for day in run.days if day in wanted]

    def figures_of(self, kind: str, runs: Iterable[str]) -> list[str]:
        """Return the folders with figures of these runs."""
        return [self.at(kind, f"run={run}") for run in sorted(set(runs))]

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Let one run at a time compare and replace the state, on a local file system.

        Elsewhere there is no lock: of two runs that commit in the same moment, one may be lost.
        """
        if not isinstance(self._fs, fs.LocalFileSystem):
            yield
            return
        self._fs.create_dir(self._path, recursive=True)
        with Path(self._path, f"{STATE}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _remove(self, name: str) -> None:
        if self._fs.get_file_info(f"{self._path}/{name}").type is fs.FileType.Directory:
            self._fs.delete_dir(f"{self._path}/{name}")

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
