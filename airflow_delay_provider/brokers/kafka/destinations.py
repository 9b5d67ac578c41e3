"""What is known of channels before something is written to them: one bad record would spoil a whole transaction.

Channels are described by the broker a few times a second while they are used. What a description does not foretell is
learned from the broker's refusals: messages for a channel that has refused one are tried by themselves, in
transactions that are never committed, until it is known of each whether the channel takes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError

from airflow_delay_provider.brokers.kafka.errors import DENIED, MISSING, UNFIT
from airflow_delay_provider.brokers.kafka.lane import GOOD, HEADER_BYTES, Opinion, Standing

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.kafka.commands import Place
    from airflow_delay_provider.brokers.kafka.trial import Trial
    from airflow_delay_provider.brokers.kafka.watch import Watch
    from airflow_delay_provider.brokers.kafka.wire import Envelope

log = logging.getLogger(__name__)

#: How long the messages of a channel are tried one by one after it has refused something.
DISTRUST_SECONDS = 30.0
#: A message that was refused so often although its trial was good is given up.
MOST_FAILURES = 3
MANY_FAILURES = 10_000
#: More messages are not tried at once: those whose turn comes later may have left by then.
MOST_ASKED = 200
#: More answers are not kept; one that is needed is asked for again.
MANY_ANSWERS = 1_000
#: No client keeps to a shorter time between the making of a record and its storing.
FRESH_MS = 1_000
#: What a batch has around its records, and a record around its content at most.
BATCH_OVERHEAD_BYTES = 61
RECORD_OVERHEAD_BYTES = 40
#: What a topic takes as a rule, where its settings may not be read.
UNKNOWN_ROOM_BYTES = 1_000_000
#: Reasons that are told once in so long for each channel.
TELL_SECONDS = 60.0

_UNKNOWN = Opinion(Standing.UNKNOWN)
#: Why a record was not stored that says nothing of its channel: the transaction ended before.
PURGED = {
    KafkaError._PURGE_QUEUE,
    KafkaError._PURGE_INFLIGHT,
    KafkaError._STATE,
    KafkaError.INVALID_TXN_STATE,
    KafkaError.INVALID_PRODUCER_EPOCH,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the broker says of a channel."""

    #: Why nothing can be written to it, as far as a person has to change that.
    refusal: str | None = None
    #: Why nothing can be written to it for the time being.
    trouble: str | None = None
    #: None where the settings may not be read.
    max_message_bytes: int | None = None
    is_compacted: bool = False
    #: How old a record may be that it takes, None where that is not limited.
    most_age_ms: int | None = None


class Destinations:
    """The opinion on each message that is due. Not for several threads."""

    def __init__(self, watch: Watch, trial: Trial, *, compresses: bool) -> None:
        self._watch = watch
        self._trial = trial
        #: Then the size of a message says little of what is stored.
        self._compresses = compresses
        self._facts: Mapping[str, Facts] = {}
        self._answers: dict[Place, Opinion] = {}
        self._asked: set[Place] = set()
        #: Channels that have refused something, until when they are distrusted.
        self._distrusted: dict[str, float] = {}
        self._failures: dict[Place, int] = {}
        self._told: dict[str, float] = {}

    def refresh(self) -> None:
        """Take in what was learned since; opinions do not change between two such calls."""
        self._facts = self._watch.channels
        for place, channel, opinion in self._trial.answers():
            if opinion.standing is not Standing.GOOD:
                self._distrust(channel)
            if place in self._asked:
                self._asked.discard(place)
                self._answers[place] = opinion
        while len(self._answers) > MANY_ANSWERS:
            # Its message was recalled, or rests again.
            del self._answers[next(iter(self._answers))]

    def expect(self, channel: str) -> None:
        """Note that something is delivered to a channel soon."""
        self._watch.want(channel)

    def is_lost(self, channels: Iterable[str]) -> str | None:
        """Return one of these channels that has become unusable by now."""
        facts = self._watch.channels
        for each in channels:
            known = facts.get(each)
            if known is None or known.refusal or known.trouble:
                return each
        return None

    def judge(self, place: Place, envelope: Envelope) -> Opinion:
        """Say whether a message can be put into its channel, as far as that is known."""
        channel = envelope.channel
        self._watch.want(channel)
        facts = self._facts.get(channel)
        if facts is None:
            return _UNKNOWN
        if facts.refusal is not None:
            return Opinion(Standing.REFUSED, facts.refusal)
        if facts.trouble is not None:
            return self._unavailable(channel, facts.trouble)
        if self._failures.get(place, 0) >= MOST_FAILURES:
            return Opinion(Standing.REFUSED, f"topic {channel} has refused it {MOST_FAILURES} times")
        if facts.is_compacted and envelope.key is None:
            return Opinion(Standing.REFUSED, f"key: topic {channel} is compacted and takes no message without one")
        if facts.most_age_ms is not None and facts.most_age_ms < FRESH_MS:
            why = f"takes only messages with a timestamp of the last {facts.most_age_ms} ms"
            hint = f"set message.timestamp.before.max.ms to {FRESH_MS} at least"
            return Opinion(Standing.REFUSED, f"topic {channel} {why}; {hint}")
        most = facts.max_message_bytes
        is_large = most is not None and size_of(envelope) + BATCH_OVERHEAD_BYTES > most
        if most is not None and is_large and not self._compresses:
            size = size_alone(envelope)
            if size > most:
                reason = f"payload: {size} bytes are too large for topic {channel}, which takes {most}"
                return Opinion(Standing.REFUSED, reason)
            is_large = False
        return self._tried(place, envelope) if is_large or self._is_distrusted(channel) else GOOD

    def room_of(self, channel: str) -> int | None:
        """Return how many bytes a channel takes at once, None where that is not known and each must go alone."""
        facts = self._facts.get(channel)
        if facts is None or facts.max_message_bytes is None:
            return None if facts is None or self._is_distrusted(channel) else UNKNOWN_ROOM_BYTES
        return facts.max_message_bytes

    def has_failed(self, place: Place) -> bool:
        """Whether a message was refused before, alone or with others: it goes alone now, so that it is known."""
        return place in self._failures

    def note_failure(self, place: Place, channel: str, error: KafkaError) -> None:
        """Learn from a message that was not stored."""
        if len(self._failures) > MANY_FAILURES:
            self._failures.clear()
        self._failures[place] = self._failures.get(place, 0) + 1
        self._distrust(channel)
        self._tell(channel, error.str())
        self._watch.look_now()

    def settle(self, place: Place) -> None:
        """Forget the answer to a message that has left the ladder; after an abort it is asked for again."""
        self._answers.pop(place, None)

    def forget(self) -> None:
        """Forget single messages: others may have their partitions by now."""
        self._answers.clear()
        self._asked.clear()

    # -- pieces --------------------------------------------------------------------------------------------------

    def _distrust(self, channel: str) -> None:
        self._distrusted[channel] = time.monotonic() + DISTRUST_SECONDS

    def _is_distrusted(self, channel: str) -> bool:
        until = self._distrusted.get(channel)
        if until is not None and time.monotonic() > until:
            del self._distrusted[channel]
            return False
        return until is not None

    def _tried(self, place: Place, envelope: Envelope) -> Opinion:
        channel = envelope.channel
        answer = self._answers.get(place)
        if answer is None:
            if place not in self._asked and len(self._asked) < MOST_ASKED:
                self._asked.add(place)
                self._trial.ask(place, envelope)
            return _UNKNOWN
        if answer.standing is Standing.UNAVAILABLE:
            self.settle(place)
            return self._unavailable(channel, answer.reason)
        return answer

    def _unavailable(self, channel: str, reason: str) -> Opinion:
        self._tell(channel, reason)
        return Opinion(Standing.UNAVAILABLE, reason)

    def _tell(self, channel: str, reason: str) -> None:
        now = time.monotonic()
        if now > self._told.get(channel, 0.0):
            self._told[channel] = now + TELL_SECONDS
            log.warning("Topic %s does not take a message: %s", channel, reason)


def size_of(envelope: Envelope) -> int:
    """Return how many bytes the record of a message has at most."""
    headers = envelope.record_headers()
    size = sum(len(name.encode()) + len(value) + HEADER_BYTES for name, value in headers)
    return size + len(envelope.payload) + len(envelope.key or b"") + RECORD_OVERHEAD_BYTES


def size_alone(envelope: Envelope) -> int:
    """Return how many bytes the batch of this message alone has, as the broker counts them, without compression."""
    headers = envelope.record_headers()
    parts = [envelope.key or b"", envelope.payload, *(part for n, v in headers for part in (n.encode(), v))]
    # Its attributes, and how much later its time and offset are than those of the first of its batch: a byte each.
    size = 3 + sum(len(part) + _length_bytes(len(part)) for part in parts) + _length_bytes(len(headers))
    return BATCH_OVERHEAD_BYTES + size + _length_bytes(size)


def _length_bytes(length: int) -> int:
    """Return how many bytes a length has itself: seven bits each, and one bit for the sign."""
    return max(1, -(-(2 * length).bit_length() // 7))


def opinion_of(error: KafkaError) -> Opinion:
    """Return what the answer to one record says of it."""
    lasting = MISSING | DENIED | UNFIT | {KafkaError.TOPIC_EXCEPTION}
    if error.code() in lasting:
        return Opinion(Standing.REFUSED, error.str())
    return Opinion(Standing.UNAVAILABLE, error.str())
