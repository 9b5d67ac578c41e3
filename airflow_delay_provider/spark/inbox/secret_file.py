"""Secret settings of Kafka's Java client in a file, so that Spark's options only name it.

Kafka's client replaces ``${file:PATH:KEY}`` in a setting when a producer is created, on the executor. So a secret
stands in no option, query plan, event log, web page or log line of Spark.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from uuid import uuid4

from pyspark import SparkContext, SparkFiles

_PROVIDER = {
    "config.providers": "file",
    "config.providers.file.class": "org.apache.kafka.common.config.provider.FileConfigProvider",
}
#: Files sent to executors, by application and content: Spark cannot take one back.
_sent: dict[tuple[str, str], str] = {}


@contextmanager
def settings_from_file(context: SparkContext, secret: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield settings that name a file with the secret ones, for as long as producers are created with them."""
    if not secret:
        yield {}
        return
    content = "".join(f"{name}={_escaped(value)}\n" for name, value in secret.items())
    if _is_one_process(context):
        folder = Path(mkdtemp(prefix="delay-kafka-"))
        try:
            yield _references(str(_write(folder, content)), secret)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    else:
        yield _references(_send(context, content), secret)


def _references(path: str, secret: Mapping[str, str]) -> dict[str, str]:
    return {**_PROVIDER, **{name: f"${{file:{path}:{name}}}" for name in secret}}


def _is_one_process(context: SparkContext) -> bool:
    master = str(context.master)
    return master.startswith("local") and not master.startswith("local-cluster")


def _send(context: SparkContext, content: str) -> str:
    """Send a file to all executors, also to those that start later; return its path there.

    It is written into the driver's own folder, which Spark deletes when the application ends.
    """
    key = (context.applicationId, content)
    if key not in _sent:
        folder = Path(mkdtemp(prefix="delay-", dir=SparkFiles.getRootDirectory()))
        file = _write(folder, content)
        context.addFile(str(file))
        # Spark has made a copy beside the folder, for the driver.
        Path(SparkFiles.get(file.name)).chmod(0o600)
        # The working directory of an executor holds the files that were sent to it.
        _sent[key] = file.name
    return _sent[key]


def _write(folder: Path, content: str) -> Path:
    file = folder / f"kafka-{uuid4().hex}.properties"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(content)
    return file


def _escaped(value: str) -> str:
    """Return a value as Java's properties files hold it."""
    for character, escaped in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"), ("\f", "\\f")):
        value = value.replace(character, escaped)
    return f"\\{value}" if value.startswith(" ") else value
