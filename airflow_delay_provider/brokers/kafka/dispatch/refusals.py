"""Finding refused records, so that one of them does not block the others.

A channel may refuse a message: a thread tries it in a transaction that is always aborted. A topic of the ladder may
refuse a record, or its processing may fail: transactions are halved until the record is alone, and it is given up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer

from airflow_delay_provider.brokers.kafka.client import (
    DENIED,
    GONE_SECONDS,
    MISSING,
    KafkaClients,
    call_until_done,
    is_unreached,
)
from airflow_delay_provider.brokers.kafka.dispatch.channel_status import (
    AVAILABLE,
    PURGED,
    ChannelCheck,
    ChannelStatus,
    check_of,
)
from airflow_delay_provider.brokers.kafka.recall import RecordPosition
from airflow_delay_provider.brokers.kafka.wire import Envelope
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
#: How long a channel may take to store a message.
ANSWER_SECONDS = 3.0
#: A channel that has not answered is not tried again for so long.
DOWN_SECONDS = 5.0
#: Most messages that are tried in one round.
TOGETHER = 100
#: Attempts of a trial whose transaction failed by itself, and by how much each pause before one is longer.
MOST_ATTEMPTS = 5
PAUSE_SECONDS = 0.1
#: How long the thread of the trials may take to stop.
STOP_SECONDS = 20.0
#: Errors of the whole transaction, not of one record.
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
#: Errors of a trial that say nothing about the message.
_UNDECIDED = PURGED | {KafkaError._INVALID_DIFFERENT_RECORD, KafkaError.CONCURRENT_TRANSACTIONS}


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


class Candidate(NamedTuple):
    """A message that its channel may refuse."""

    position: RecordPosition
    envelope: Envelope


class Trial:
    """Tries messages; consumers that read committed records never see them."""

    def __init__(self, make_producer: Callable[[], Producer]) -> None:
        self._make_producer = make_producer
        self._producer: Producer | None = None
        self._candidates: SimpleQueue[Candidate | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[RecordPosition, str, ChannelCheck]] = SimpleQueue()
        #: Channels that did not answer, until when they are not tried, and why.
        self._down: dict[str, tuple[float, str]] = {}
        self._thread: threading.Thread | None = None

    def submit(self, position: RecordPosition, envelope: Envelope) -> None:
        """Try a message; the result comes later."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="delay-kafka-trial", daemon=True)
            self._thread.start()
        self._candidates.put(Candidate(position, envelope))

    def results(self) -> Iterator[tuple[RecordPosition, str, ChannelCheck]]:
        """Return new results: the record, its channel, and whether the channel accepts it."""
        while True:
            try:
                yield self._results.get_nowait()
            except Empty:
                return

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._candidates.put(None)
            self._thread.join(STOP_SECONDS)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (first := self._candidates.get()) is not None:
            by_channel: dict[str, list[Candidate]] = defaultdict(list)
            by_channel[first.envelope.channel].append(first)
            for _ in range(TOGETHER - 1):
                try:
                    candidate = self._candidates.get_nowait()
                except Empty:
                    break
                if candidate is None:
                    return
                by_channel[candidate.envelope.channel].append(candidate)
            for channel, candidates in by_channel.items():
                self._try_all(channel, candidates)

    def _try_all(self, channel: str, candidates: Sequence[Candidate]) -> None:
        """Try all together, and again those behind a refused one; each gets a result, whatever happens."""
        left = list(candidates)
        while left:
            checks = self._try(channel, left)
            if not checks:
                checks = {left[0].position: ChannelCheck(ChannelStatus.UNAVAILABLE, f"topic {channel} does not answer")}
            for position, check in checks.items():
                self._results.put((position, channel, check))
            left = [each for each in left if each.position not in checks]

    def _try(self, channel: str, candidates: Sequence[Candidate]) -> dict[RecordPosition, ChannelCheck]:
        until, reason = self._down.get(channel, (0.0, ""))
        if time.monotonic() < until:
            return {each.position: ChannelCheck(ChannelStatus.UNAVAILABLE, reason) for each in candidates}
        try:
            checks = self._write(candidates)
        except KafkaException as error:
            checks = {
                each.position: ChannelCheck(ChannelStatus.UNAVAILABLE, error.args[0].str()) for each in candidates
            }
        except Exception:
            # A defect of this package: the message waits.
            log.exception("A message for %s could not be tried", channel)
            self._producer = None
            checks = {
                each.position: ChannelCheck(ChannelStatus.UNAVAILABLE, "it could not be tried") for each in candidates
            }
        for check in checks.values():
            if check.status is ChannelStatus.UNAVAILABLE:
                self._down[channel] = (time.monotonic() + DOWN_SECONDS, check.reason)
        return checks

    def _write(self, candidates: Sequence[Candidate]) -> dict[RecordPosition, ChannelCheck]:
        """Write them, and again if the transaction itself failed: that says nothing about them."""
        for attempt in range(1, MOST_ATTEMPTS + 1):
            try:
                return self._write_once(candidates)
            except KafkaException:
                # A producer whose abort failed may never begin again.
                self._producer = None
                if attempt == MOST_ATTEMPTS:
                    raise
                time.sleep(PAUSE_SECONDS * attempt)
        raise AssertionError

    def _write_once(self, candidates: Sequence[Candidate]) -> dict[RecordPosition, ChannelCheck]:
        if self._producer is None:
            self._producer = self._make_producer()
        producer = self._producer
        reports: dict[RecordPosition, KafkaError | None] = {}
        producer.begin_transaction()
        try:
            for candidate in candidates:
                envelope = candidate.envelope
                producer.produce(
                    envelope.channel,
                    envelope.payload,
                    envelope.key,
                    headers=envelope.record_headers(),
                    on_delivery=_noting(reports, candidate.position),
                )
            left = producer.flush(ANSWER_SECONDS + 1)
        except KafkaException as error:
            if len(candidates) > 1 or not is_of_record(error):
                raise
            reports[candidates[0].position] = error.args[0]
            left = 0
        finally:
            call_until_done(producer.abort_transaction)
            # Records in transit report now that they were purged.
            producer.poll(0)
        checks = {
            position: AVAILABLE if error is None else check_of(error)
            for position, error in reports.items()
            if error is None or error.code() not in _UNDECIDED
        }
        if left:
            late = ChannelCheck(ChannelStatus.UNAVAILABLE, f"no answer within {ANSWER_SECONDS:g} s")
            checks = {each.position: checks.get(each.position, late) for each in candidates}
        return checks


def _noting(
    reports: dict[RecordPosition, KafkaError | None], position: RecordPosition
) -> Callable[[KafkaError | None, Any], None]:
    return lambda error, _record: reports.__setitem__(position, error)


def open_trial_producer(clients: KafkaClients, name: str) -> Producer:
    """Start the producer of a trial, in the thread of the trial."""
    producer = clients.make_producer(
        {
            "transactional.id": f"{clients.config.topology.prefix}.{name}.trial",
            "transaction.timeout.ms": GONE_SECONDS * 1000,
            "message.timeout.ms": round(ANSWER_SECONDS * 1000),
            "batch.num.messages": 1,
            "delivery.report.only.error": False,
            # Records behind a refused one are not sent, so they get no wrong result.
            "max.in.flight.requests.per.connection": 1,
            "linger.ms": 0,
            "retry.backoff.ms": 5,
        }
    )
    call_until_done(producer.init_transactions)
    return producer
