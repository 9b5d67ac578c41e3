"""What the service keeps beside Spark's own files in the checkpoint folder, on any file system that Spark knows."""

from __future__ import annotations

import json
from typing import Any, cast

from pyspark.sql import SparkSession

from airflow_delay_provider.domain.exceptions import ConfigurationError

_FOLDER = "delay"


class CheckpointFiles:
    """Small JSON files, each replaced as a whole."""

    def __init__(self, spark: SparkSession, checkpoint: str) -> None:
        self.checkpoint = checkpoint
        self._jvm = cast(Any, spark._jvm)
        self._gateway: Any = spark.sparkContext._gateway
        hadoop = cast(Any, spark._jsc).hadoopConfiguration()
        hdfs = self._jvm.org.apache.hadoop.fs
        try:
            self._folder = hdfs.Path(checkpoint, _FOLDER)
            self._files = self._folder.getFileSystem(hadoop)
            self._context = hdfs.FileContext.getFileContext(self._files.getUri(), hadoop)
            self._files.mkdirs(self._folder)
        except Exception as error:  # noqa: BLE001 - each file system has errors of its own
            raise ConfigurationError(
                f"--checkpoint: {checkpoint} cannot be used ({_first_line(error)}); name a folder that driver and"
                " executors can write to"
            ) from None

    def read(self, name: str) -> Any:
        """Return the content of a file; None if there is none."""
        path = self._path(f"{name}.json")
        if not self._files.exists(path):
            return None
        stream = self._files.open(path)
        try:
            return json.loads(bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)))
        finally:
            stream.close()

    def write(self, name: str, content: Any) -> None:
        """Replace a file: a reader sees the old content or the new one."""
        new, path = self._path(f".{name}.new"), self._path(f"{name}.json")
        stream = self._files.create(new, True)
        try:
            stream.write(bytearray(json.dumps(content).encode()))
        finally:
            stream.close()
        rename = self._jvm.org.apache.hadoop.fs.Options.Rename
        options = self._gateway.new_array(rename, 1)
        options[0] = rename.OVERWRITE
        self._context.rename(new, path, options)

    def is_begun(self) -> bool:
        """Whether Spark has begun a query with this checkpoint."""
        return bool(self._files.exists(self._jvm.org.apache.hadoop.fs.Path(self.checkpoint, "offsets")))

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._folder, name)


def _first_line(error: Exception) -> str:
    text = str(getattr(error, "java_exception", None) or error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
