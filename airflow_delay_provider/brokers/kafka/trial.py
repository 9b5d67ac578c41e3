"""A thread that finds out whether a channel takes a message, by writing it in a transaction that is always aborted."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException

from airflow_delay_provider.brokers.kafka.destinations import PURGED, opinion_of
from airflow_delay_provider.brokers.kafka.isolation import is_of_record
from airflow_delay_provider.brokers.kafka.lane import GOOD, Opinion, Standing
from airflow_delay_provider.brokers.kafka.outlet import until_done

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from airflow_delay_provider.brokers.kafka.commands import Place
    from airflow_delay_provider.brokers.kafka.wire import Envelope

log = logging.getLogger(__name__)

#: How long a channel may take to answer.
ANSWER_SECONDS = 3.0
#: A channel that has not answered is not asked again for so long.
DOWN_SECONDS = 5.0
TOGETHER = 100
#: How often a transaction is tried that failed by itself, and how much longer each pause before that is.
MOST_ATTEMPTS = 5
PAUSE_SECONDS = 0.1
STOP_SECONDS = 20.0


class Question(NamedTuple):
    """A message that may not be taken."""

    place: Place
    envelope: Envelope


class Trial:
    """Readers of committed records see nothing of it."""

    def __init__(self, make_producer: Callable[[], Producer]) -> None:
        self._make_producer = make_producer
        self._producer: Producer | None = None
        self._questions: SimpleQueue[Question | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[Place, str, Opinion]] = SimpleQueue()
        #: Channels that did not answer, until when they are left alone, and why.
        self._down: dict[str, tuple[float, str]] = {}
        self._thread: threading.Thread | None = None

    def ask(self, place: Place, envelope: Envelope) -> None:
        """Try a message; the answer comes later."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="delay-kafka-trial", daemon=True)
            self._thread.start()
        self._questions.put(Question(place, envelope))

    def answers(self) -> Iterator[tuple[Place, str, Opinion]]:
        """Return what was found out since: the record, its channel, and whether that takes it."""
        while True:
            try:
                yield self._answers.get_nowait()
            except Empty:
                return

    def close(self) -> None:
        """Try nothing more."""
        if self._thread is not None:
            self._questions.put(None)
            self._thread.join(STOP_SECONDS)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (first := self._questions.get()) is not None:
            by_channel: dict[str, list[Question]] = defaultdict(list)
            by_channel[first.envelope.channel].append(first)
            for _ in range(TOGETHER - 1):
                try:
                    question = self._questions.get_nowait()
                except Empty:
                    break
                if question is None:
                    return
                by_channel[question.envelope.channel].append(question)
            for channel, questions in by_channel.items():
                self._answer(channel, questions)

    def _answer(self, channel: str, questions: Sequence[Question]) -> None:
        """Try all together, and again those behind one that is refused; each gets an answer, whatever happens."""
        left = list(questions)
        while left:
            opinions = self._try(channel, left)
            if not opinions:
                opinions = {left[0].place: Opinion(Standing.UNAVAILABLE, f"topic {channel} does not answer")}
            for place, opinion in opinions.items():
                self._answers.put((place, channel, opinion))
            left = [each for each in left if each.place not in opinions]

    def _try(self, channel: str, questions: Sequence[Question]) -> dict[Place, Opinion]:
        until, reason = self._down.get(channel, (0.0, ""))
        if time.monotonic() < until:
            return {each.place: Opinion(Standing.UNAVAILABLE, reason) for each in questions}
        try:
            opinions = self._write(questions)
        except KafkaException as error:
            opinions = {each.place: Opinion(Standing.UNAVAILABLE, error.args[0].str()) for each in questions}
        except Exception:
            # A defect of ours: the message waits.
            log.exception("A message for %s could not be tried", channel)
            self._producer = None
            opinions = {each.place: Opinion(Standing.UNAVAILABLE, "it could not be tried") for each in questions}
        for opinion in opinions.values():
            if opinion.standing is Standing.UNAVAILABLE:
                self._down[channel] = (time.monotonic() + DOWN_SECONDS, opinion.reason)
        return opinions

    def _write(self, questions: Sequence[Question]) -> dict[Place, Opinion]:
        """Write them, and again where the transaction itself failed: that says nothing of them."""
        for attempt in range(1, MOST_ATTEMPTS + 1):
            try:
                return self._write_once(questions)
            except KafkaException:
                # One whose abort failed may never begin again.
                self._producer = None
                if attempt == MOST_ATTEMPTS:
                    raise
                time.sleep(PAUSE_SECONDS * attempt)
        raise AssertionError

    def _write_once(self, questions: Sequence[Question]) -> dict[Place, Opinion]:
        if self._producer is None:
            self._producer = self._make_producer()
        producer = self._producer
        reports: dict[Place, KafkaError | None] = {}
        producer.begin_transaction()
        try:
            for question in questions:
                envelope = question.envelope
                producer.produce(
                    envelope.channel,
                    envelope.payload,
                    envelope.key,
                    headers=envelope.record_headers(),
                    on_delivery=_noting(reports, question.place),
                )
            left = producer.flush(ANSWER_SECONDS + 1)
        except KafkaException as error:
            if len(questions) > 1 or not is_of_record(error):
                raise
            reports[questions[0].place] = error.args[0]
            left = 0
        finally:
            until_done(producer.abort_transaction)
            # Those that were on their way say that they are purged now.
            producer.poll(0)
        opinions = {
            place: GOOD if error is None else opinion_of(error)
            for place, error in reports.items()
            if error is None or error.code() not in _UNDECIDED
        }
        if left:
            late = Opinion(Standing.UNAVAILABLE, f"no answer within {ANSWER_SECONDS:g} s")
            opinions = {each.place: opinions.get(each.place, late) for each in questions}
        return opinions


_UNDECIDED = PURGED | {KafkaError._INVALID_DIFFERENT_RECORD, KafkaError.CONCURRENT_TRANSACTIONS}


def _noting(reports: dict[Place, KafkaError | None], place: Place) -> Callable[[KafkaError | None, Any], None]:
    return lambda error, _record: reports.__setitem__(place, error)
