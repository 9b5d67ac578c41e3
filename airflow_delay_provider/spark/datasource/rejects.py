"""Rejected rows: each task writes its own into a staging folder, and the driver's commit publishes them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from airflow_delay_provider.domain.exceptions import ConfigurationError, DelayError
from airflow_delay_provider.spark.datasource.locations import Location

if TYPE_CHECKING:
    import pyarrow as pa

#: The column of a message's field, where the names differ.
_COLUMNS = {"message_id": "id"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reject:
    """A row that cannot be scheduled, the column to correct, and why."""

    row: Mapping[str, Any]
    field: str
    reason: str

    @classmethod
    def of(cls, batch: pa.RecordBatch, number: int, error: DelayError) -> Reject:
        """Return the reject of a row of a batch; errors that name no field are about the id."""
        name, reason = getattr(error, "field", "id"), str(error)
        if name in _COLUMNS:
            name, reason = _COLUMNS[name], reason.replace(name, _COLUMNS[name], 1)
        return cls(row=_row_of(batch, number), field=name, reason=reason)

    def as_line(self) -> bytes:
        """Return one line of JSON."""
        content = {"field": self.field, "reason": self.reason, "row": self.row}
        return json.dumps(content, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


@dataclass(frozen=True, kw_only=True)
class RejectsFolder:
    """Where the rejected rows of one write go; all its processes must see the same folder.

    Rejects of failed tasks, and of copies of a task that Spark gave up, stay in the staging folder and are deleted with
    it. It is kept if rejects cannot be published: by then, all other rows are scheduled.
    """

    location: Location
    #: Unique for the write.
    write_id: str

    @classmethod
    def prepare(cls, text: str) -> RejectsFolder:
        """Return the folder for the rejects of a new write; refuse one that the driver cannot write to."""
        folder = cls(location=Location.parse("rejects", text), write_id=uuid4().hex)
        folder.location.prepare_folder()
        return folder

    def file_of(self, part: str) -> Location:
        """Return where a file of this write is once it is published."""
        return self.location.child(f"rejects-{self.write_id}-{part}")

    def open_part(self, name: str) -> RejectsPart:
        """Return the file of one task, created with its first reject."""
        return RejectsPart(self._staging.child(f"{name}.jsonl"))

    def publish(self, parts: Sequence[str]) -> None:
        """Move the files of finished tasks to their place, and delete all others; a failure keeps what is not moved."""
        try:
            for part in parts:
                self._publish(self._staging.child(part), self.file_of(part))
            self.discard()
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error}; rejected rows that are not in {self.location.text} yet stay in {self._staging.text}, so move"
                " its files by hand"
            ) from None

    def _publish(self, staged: Location, target: Location) -> None:
        if not staged.exists():
            raise ConfigurationError(
                f"rejects: {staged.text} is not there, so an executor on another machine wrote it to its own disk;"
                " name a folder that all machines share, such as s3://bucket/folder"
            )
        staged.move(target)

    def discard(self) -> None:
        """Delete what is staged."""
        self._staging.delete_folder()

    @property
    def _staging(self) -> Location:
        # Spark and Hadoop ignore names that begin with an underscore.
        return self.location.child(f"_staged-{self.write_id}")


class RejectsPart:
    """The rejects of one task, written while it runs."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._file: Any = None

    @property
    def name(self) -> str | None:
        """The name of the file; None if nothing was rejected."""
        return None if self._file is None else self._location.text.rpartition("/")[2]

    def write(self, rejects: Iterable[Reject]) -> None:
        """Append rejects."""
        self.write_lines(reject.as_line() for reject in rejects)

    def write_lines(self, lines: Iterable[bytes]) -> None:
        """Append rejects that are lines of JSON already."""
        for line in lines:
            if self._file is None:
                self._file = self._location.create()
            self._file.write(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def _row_of(batch: pa.RecordBatch, number: int) -> dict[str, Any]:
    """Return a row as JSON can show it; bytes are written in base64, in a field that says so."""
    row: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        value = _value_of(column[number])
        if isinstance(value, bytes):
            row[f"{name}_base64"] = base64.b64encode(value).decode()
        else:
            row[name] = value
    return row


def _value_of(scalar: pa.Scalar) -> Any:
    try:
        value = scalar.as_py()
    except UnicodeDecodeError:
        return scalar.as_buffer().to_pybytes()
    except (ValueError, OverflowError):
        # A time that Python cannot have.
        return str(scalar.value)
    match value:
        case datetime() | date():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case list():
            return dict(value)
        case bytes() | str() | int() | None:
            return value
    return str(value)
