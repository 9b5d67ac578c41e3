"""What can be divided into ranges and read range by range."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_delay_provider.spark.datasource.filters import Condition

#: Rows, or records, of one range if the reader decides.
RANGE_SIZE = 1_000_000


@dataclass(frozen=True)
class Range(InputPartition):
    """Numbers from ``start`` up to, not including, ``end``: of rows, or of records in one partition of a topic."""

    start: int
    end: int
    partition: int = 0


class TableReader(ABC):
    """Reads one table. Spark pickles it for executors, with the connection."""

    @abstractmethod
    def applies(self, condition: Condition) -> bool:
        """Whether only rows that fulfil this condition are returned, so that Spark need not look again."""

    @abstractmethod
    def divide(self, conditions: Sequence[Condition]) -> Sequence[Range]:
        """Return the ranges to read, as of now."""

    @abstractmethod
    def read(self, part: Range, conditions: Sequence[Condition]) -> Iterator[pa.RecordBatch]:
        """Return the rows of one range."""


def split(start: int, end: int, pieces: int | None, *, partition: int = 0) -> list[Range]:
    """Divide numbers into ranges of equal length: so many, or as many as their length suggests."""
    length = end - start
    if length <= 0:
        return []
    wanted = pieces or -(-length // RANGE_SIZE)
    step = -(-length // min(wanted, length))
    return [Range(each, min(each + step, end), partition) for each in range(start, end, step)]
