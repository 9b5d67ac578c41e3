"""Has executors work for ever, one partition each; says when the first one does."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession

_mark, sign_of_life = sys.argv[1:3]


def work(numbers: Iterator[int]) -> Iterator[int]:
    Path(sign_of_life).touch()
    time.sleep(600)
    return numbers


SparkSession.builder.getOrCreate().sparkContext.parallelize(range(2), 2).mapPartitions(work).count()
