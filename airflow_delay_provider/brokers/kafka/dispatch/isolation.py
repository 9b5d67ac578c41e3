"""Finding the one record that fails a transaction: transactions are halved until it is alone, and it is given up."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from confluent_kafka import KafkaError, KafkaException

from airflow_delay_provider.brokers.kafka.client import DENIED, MISSING, is_unreached
from airflow_delay_provider.brokers.kafka.recall import RecordPosition
from airflow_delay_provider.domain.exceptions import DelayError

log = logging.getLogger(__name__)

#: A record is given up after so many failures.
MOST_DEFECTS = 2
#: After so many failures without a commit, the cause is not one record.
HOPELESS_FAILURES = 40
#: Most records that are remembered; one that fails again is found again.
MANY_RECORDS = 1_000
#: Most steps of a transaction.
MANY_STEPS = 1_000_000


class RecordRefusedError(KafkaException):  # type: ignore[misc]  # the library has no types
    """A topic of the ladder refused a record."""


class RecordFailedError(DelayError):
    """Processing this record failed."""

    def __init__(self, position: RecordPosition | None, cause: Exception) -> None:
        where = "a record" if position is None else f"{position.topic}/{position.partition}/{position.offset}"
        super().__init__(f"{where} cannot be processed: {type(cause).__name__}: {cause}")
        self.position = position


class Isolation:
    """Limits transactions after failures, and remembers which records are given up."""

    def __init__(self) -> None:
        self._limit = MANY_STEPS
        self._steps = 0
        self._last: RecordPosition | None = None
        self._failures = 0
        self._defects: dict[RecordPosition, int] = {}
        self._given_up: dict[RecordPosition, tuple[str, bool]] = {}

    @property
    def is_careful(self) -> bool:
        """Whether transactions are smaller than usual."""
        return self._limit < MANY_STEPS

    @property
    def is_hopeless(self) -> bool:
        """Whether the cause of the failures is not one record."""
        return self._failures >= HOPELESS_FAILURES

    @property
    def steps_left(self) -> int:
        """Steps that this transaction may still have."""
        return self._limit - self._steps

    def given_up(self, topic: str, partition: int) -> Mapping[int, tuple[str, bool]]:
        """Return the offsets of records that are given up, why, and whether their content may be kept."""
        return {
            each.offset: why
            for each, why in self._given_up.items()
            if (each.topic, each.partition) == (topic, partition)
        }

    def count(self, steps: int, last: RecordPosition | None) -> None:
        """Count the steps in the transaction."""
        if steps:
            self._steps += steps
            self._last = last

    def note_commit(self) -> None:
        """Allow larger transactions again."""
        if self._steps or self._failures:
            self._limit = MANY_STEPS if self._limit >= MANY_STEPS // 2 else 2 * self._limit
        self._steps, self._failures = 0, 0

    def note_failure(self, error: KafkaException) -> None:
        """Learn from a transaction that failed: with one step in it, that was its record."""
        steps, self._steps = self._steps, 0
        self._failures += 1
        if not isinstance(error, RecordRefusedError) or not is_of_record(error):
            return
        if steps <= 1 and self._last is not None:
            self._give_up(self._last, error.args[0].str())
        else:
            self._limit = max(1, min(steps, 2000) // 2)

    def note_defect(self, error: RecordFailedError) -> None:
        """Learn from a record whose processing failed; one failure may be chance."""
        self._steps = 0
        self._failures += 1
        if error.position is None:
            return
        if len(self._defects) >= MANY_RECORDS:
            self._defects.clear()
        self._defects[error.position] = self._defects.get(error.position, 0) + 1
        if self._defects[error.position] >= MOST_DEFECTS:
            self._give_up(error.position, str(error))
        log.warning("A record failed", exc_info=error)

    def _give_up(self, position: RecordPosition, reason: str) -> None:
        """Give a record up; if its dead letter failed too, without its content."""
        if len(self._given_up) >= MANY_RECORDS:
            self._given_up.clear()
        self._given_up[position] = (reason, position not in self._given_up)
        log.error("Record %s/%d/%d is given up: %s", position.topic, position.partition, position.offset, reason)


def is_of_record(error: KafkaException) -> bool:
    """Whether the broker or the library refused one record, and not the whole transaction or this client."""
    inner = error.args[0]
    if inner.fatal() or inner.retriable() or is_unreached(error) or inner.txn_requires_abort():
        return False
    return inner.code() not in DENIED | MISSING | _OF_TRANSACTION


_OF_TRANSACTION = {
    KafkaError._STATE,
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError.INVALID_TXN_STATE,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.FENCED_INSTANCE_ID,
}
