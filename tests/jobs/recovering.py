"""Fails in the given way until its cause is repaired: ``recovering.py WAY FOLDER``.

Each submission leaves a line in ``FOLDER/submissions``, and one in ``FOLDER/overlaps`` when another still runs.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession

way, folder = sys.argv[1], Path(sys.argv[2])
lock = (folder / "lock").open("w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    (folder / "overlaps").write_text(f"{time.time()}\n")
with (folder / "submissions").open("a") as submissions:
    submissions.write(f"{time.time()} {os.getpid()}\n")


def read_source(numbers: Iterator[int]) -> Iterator[int]:
    """Connection refused until the source listens."""
    port = (folder / "port").read_text()
    return iter([sum(numbers) + len(urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10).read())])


def fill_disk(numbers: Iterator[int]) -> Iterator[int]:
    """No space left until the file leads elsewhere than to /dev/full."""
    (folder / "disk").write_bytes(b"x" * 100_000)
    return numbers


def work(numbers: Iterator[int]) -> Iterator[int]:
    """Until its cause is repaired."""
    (folder / "working").touch()
    deadline = time.monotonic() + 300
    while not (folder / "mended").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    return numbers


spark = SparkSession.builder.getOrCreate()
numbers = spark.sparkContext.parallelize(range(4), 1)
if way == "source":
    print("sum", numbers.mapPartitions(read_source).sum())
elif way == "disk":
    print("count", numbers.mapPartitions(fill_disk).count())
elif way == "work":
    print("count", numbers.mapPartitions(work).count())
else:
    raise SystemExit(f"there is no way {way}")
