"""Files that all processes of a job can use: paths, and URIs of the file systems that Arrow knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from pyarrow import fs as arrow_fs

from airflow_delay_provider.domain.exceptions import ConfigurationError

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class Location:
    """A file or folder that an option names."""

    #: The option, for error messages.
    option: str
    #: An absolute path, or a URI such as ``s3://bucket/folder``.
    text: str

    @classmethod
    def parse(cls, option: str, text: str) -> Location:
        """Return the location, which means the same in all processes; refuse a URI that has more than a path."""
        parts = urlsplit(text)
        if parts.username or parts.password:
            raise ConfigurationError(
                f"{option}: the URI contains credentials, which Spark would show; leave them out, and give them to the"
                " environment of the driver and the executors"
            )
        if parts.scheme and ("?" in text or "#" in text):
            # Names of files are appended to the text, and would become a part of the query.
            raise ConfigurationError(
                f"{option}: the URI has a query or a fragment; end it with the path, and give settings such as"
                " AWS_REGION to the environment of the driver and the executors"
            )
        location = cls(option=option, text=text.rstrip("/") if parts.scheme else str(Path(text).absolute()))
        location._open()
        return location

    def child(self, name: str) -> Location:
        """Return a file or folder in this folder."""
        return Location(option=self.option, text=f"{self.text}/{name}")

    def prepare_folder(self) -> None:
        """Create it as a folder, if it does not exist, and check that files can be written there."""
        self._make_folder()
        filesystem, path = self.child(f"_probe-{uuid4().hex}")._open()
        self._attempt(lambda: filesystem.open_output_stream(path).close())
        self._attempt(lambda: filesystem.delete_file(path))

    def prepare_file(self) -> None:
        """Check that it can be written as a file; one that exists stays as it is."""
        filesystem, path = self._open()
        if self._attempt(lambda: filesystem.get_file_info(path)).type == arrow_fs.FileType.Directory:
            raise ConfigurationError(f"{self.option}: {self.text} is a folder; name a file")
        self._parent.prepare_folder()

    def create(self) -> Any:
        """Return the open file, in a folder that is created, too; an earlier one is overwritten."""
        self._parent._make_folder()
        filesystem, path = self._open()
        return self._attempt(lambda: filesystem.open_output_stream(path))

    def write(self, content: bytes) -> None:
        """Write the whole file."""
        with self.create() as file:
            self._attempt(lambda: file.write(content))

    def exists(self) -> bool:
        """Whether there is such a file or folder."""
        filesystem, path = self._open()
        found = self._attempt(lambda: filesystem.get_file_info(path))
        return bool(found.type != arrow_fs.FileType.NotFound)

    def move(self, target: Location) -> None:
        """Rename it."""
        filesystem, path = self._open()
        self._attempt(lambda: filesystem.move(path, target._open()[1]))

    def delete_folder(self) -> None:
        """Delete it, if it exists, with everything in it."""
        filesystem, path = self._open()
        if self.exists():
            self._attempt(lambda: filesystem.delete_dir(path))

    @property
    def _parent(self) -> Location:
        return Location(option=self.option, text=self.text.rpartition("/")[0] or "/")

    def _make_folder(self) -> None:
        filesystem, path = self._open()
        self._attempt(lambda: filesystem.create_dir(path, recursive=True))

    def _open(self) -> tuple[Any, str]:
        try:
            filesystem, path = arrow_fs.FileSystem.from_uri(self.text)
        except (OSError, ValueError, NotImplementedError) as error:
            raise ConfigurationError(
                f"{self.option}: {self.text} cannot be used ({error}); name a path, or a URI such as s3://bucket/folder"
            ) from None
        return filesystem, path

    def _attempt(self, step: Callable[[], ResultT]) -> ResultT:
        try:
            return step()
        except OSError as error:
            raise ConfigurationError(
                f"{self.option}: {self.text} cannot be written ({error.strerror or error}); name a place that the"
                " driver and all executors can write to"
            ) from None
