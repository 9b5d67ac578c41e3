"""Finding the one record that spoils a transaction: transactions are halved until it stands alone, and is given up."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException

from airflow_delay_provider.brokers.kafka.errors import DENIED, MISSING
from airflow_delay_provider.brokers.kafka.link import is_unreached
from airflow_delay_provider.brokers.kafka.outlet import RecordRefusedError
from airflow_delay_provider.exceptions import DelayError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.kafka.commands import Place

log = logging.getLogger(__name__)

#: A record whose handling failed so often is given up.
MOST_DEFECTS = 2
#: With so many failures and no commit between them, it is not one record.
HOPELESS_FAILURES = 40
#: More are not remembered; one that fails again is found again.
MANY_RECORDS = 1_000
#: No transaction has more steps.
MANY_STEPS = 1_000_000


class RecordFailedError(DelayError):
    """Something went wrong while this record was handled."""

    def __init__(self, place: Place | None, cause: Exception) -> None:
        where = "a record" if place is None else f"{place.topic}/{place.lane}/{place.offset}"
        super().__init__(f"{where} cannot be handled: {type(cause).__name__}: {cause}")
        self.place = place


class Isolation:
    """How careful a dispatcher is, and which records it has given up; kept over transactions."""

    def __init__(self) -> None:
        self._limit = MANY_STEPS
        self._steps = 0
        self._last: Place | None = None
        self._failures = 0
        self._defects: dict[Place, int] = {}
        self._condemned: dict[Place, tuple[str, bool]] = {}

    @property
    def is_careful(self) -> bool:
        """Whether transactions are smaller than usual."""
        return self._limit < MANY_STEPS

    @property
    def is_hopeless(self) -> bool:
        """Whether it is not one record that fails."""
        return self._failures >= HOPELESS_FAILURES

    @property
    def steps_left(self) -> int:
        """How many steps this transaction may still have."""
        return self._limit - self._steps

    def condemned(self, topic: str, lane: int) -> Mapping[int, tuple[str, bool]]:
        """Return the offsets of records that are given up, why, and whether their content may be kept."""
        return {each.offset: why for each, why in self._condemned.items() if (each.topic, each.lane) == (topic, lane)}

    def count(self, steps: int, last: Place | None) -> None:
        """Note what is in the transaction."""
        if steps:
            self._steps += steps
            self._last = last

    def note_commit(self) -> None:
        """Be a little less careful."""
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
            self._condemn(self._last, error.args[0].str())
        else:
            self._limit = max(1, min(steps, 2000) // 2)

    def note_defect(self, error: RecordFailedError) -> None:
        """Learn from a record whose handling failed; once may be chance."""
        self._steps = 0
        self._failures += 1
        if error.place is None:
            return
        if len(self._defects) >= MANY_RECORDS:
            self._defects.clear()
        self._defects[error.place] = self._defects.get(error.place, 0) + 1
        if self._defects[error.place] >= MOST_DEFECTS:
            self._condemn(error.place, str(error))
        log.warning("A record failed", exc_info=error)

    def _condemn(self, place: Place, reason: str) -> None:
        """Give a record up; where not even that was possible, its content is left behind."""
        if len(self._condemned) >= MANY_RECORDS:
            self._condemned.clear()
        self._condemned[place] = (reason, place not in self._condemned)
        log.error("%s/%d/%d is given up: %s", place.topic, place.lane, place.offset, reason)


def is_of_record(error: KafkaException) -> bool:
    """Whether the broker or the library has refused one record, and not the whole transaction or everybody."""
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
