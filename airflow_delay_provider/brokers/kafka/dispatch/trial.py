"""A thread that tries whether a channel accepts a message, in a transaction that is always aborted."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer

from airflow_delay_provider.brokers.kafka.client import GONE_SECONDS, KafkaClients, call_until_done
from airflow_delay_provider.brokers.kafka.dispatch.channel_status import (
    AVAILABLE,
    PURGED,
    ChannelCheck,
    ChannelStatus,
    check_of,
)
from airflow_delay_provider.brokers.kafka.dispatch.isolation import is_of_record
from airflow_delay_provider.brokers.kafka.recall import RecordPosition
from airflow_delay_provider.brokers.kafka.wire import Envelope

log = logging.getLogger(__name__)

#: How long a channel may take to store a message.
ANSWER_SECONDS = 3.0
#: A channel that has not answered is not tried again for so long.
DOWN_SECONDS = 5.0
TOGETHER = 100
#: Attempts of a transaction that failed by itself, and by how much each pause before one is longer.
MOST_ATTEMPTS = 5
PAUSE_SECONDS = 0.1
STOP_SECONDS = 20.0


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


_UNDECIDED = PURGED | {KafkaError._INVALID_DIFFERENT_RECORD, KafkaError.CONCURRENT_TRANSACTIONS}


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
