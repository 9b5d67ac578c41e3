"""Whether messages can be written to their channels: one refused record would fail a whole transaction.

The broker describes the channels in use a few times a second. A description does not predict every refusal. So after a
channel has refused a message, its messages are tried one by one, in transactions that are never committed, until it is
known of each whether the channel accepts it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError

from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.dispatch.channel_status import (
    AVAILABLE,
    ChannelCheck,
    ChannelDescription,
    ChannelStatus,
    ChannelWatch,
)
from airflow_delay_provider.brokers.kafka.dispatch.refusals import Trial, open_trial_producer
from airflow_delay_provider.brokers.kafka.header_protocol import HEADER_BYTES

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.kafka.dispatch.channel_status import ChannelWatch
    from airflow_delay_provider.brokers.kafka.recall import RecordPosition
    from airflow_delay_provider.brokers.kafka.wire import Envelope

log = logging.getLogger(__name__)

#: How long the messages of a channel are tried one by one after a refusal.
DISTRUST_SECONDS = 30.0
#: A message is given up after so many refusals in spite of successful trials.
MOST_FAILURES = 3
MANY_FAILURES = 10_000
#: Most messages that are tried at once; others may have left by the time of their trial.
MOST_ASKED = 200
#: Most trial results that are kept; one that is needed again is tried again.
MANY_RESULTS = 1_000
#: No client stores a record sooner than this after its timestamp.
FRESH_MS = 1_000
#: Overhead of a batch, and the most that a record has.
BATCH_OVERHEAD_BYTES = 61
RECORD_OVERHEAD_BYTES = 40
#: What most topics accept; used if the settings may not be read.
ASSUMED_MAX_BYTES = 1_000_000
#: How often the refusals of a channel are logged.
LOG_SECONDS = 60.0
_UNKNOWN = ChannelCheck(ChannelStatus.UNKNOWN)


class Channels:
    """Checks each message that is due. Not thread-safe."""

    def __init__(self, watch: ChannelWatch, trial: Trial, *, compresses: bool) -> None:
        self.watch = watch
        self._trial = trial
        #: Then the size of a message says little about the size of its record.
        self._compresses = compresses
        self._facts: Mapping[str, ChannelDescription] = {}
        self._results: dict[RecordPosition, ChannelCheck] = {}
        self._asked: set[RecordPosition] = set()
        #: Channels that have refused a message, and until when their messages are tried first.
        self._distrusted: dict[str, float] = {}
        self._failures: dict[RecordPosition, int] = {}
        self._logged_until: dict[str, float] = {}

    @classmethod
    def open(cls, clients: KafkaClients, name: str) -> Channels:
        """Start the threads of a dispatcher of this name."""
        watch, trial = ChannelWatch(clients.config), Trial(partial(open_trial_producer, clients, name))
        watch.start()
        compresses = str(clients.config.client.get("compression.type", "none")) != "none"
        return cls(watch, trial, compresses=compresses)

    def close(self) -> None:
        """Stop the threads."""
        self.watch.close()
        self._trial.close()

    def refresh(self) -> None:
        """Read new descriptions and trial results; checks do not change between two such calls."""
        self._facts = self.watch.channels
        for position, channel, check in self._trial.results():
            if check.status is not ChannelStatus.AVAILABLE:
                self._distrust(channel)
            if position in self._asked:
                self._asked.discard(position)
                self._results[position] = check
        while len(self._results) > MANY_RESULTS:
            # Its message was recalled, or waits in a rung again.
            del self._results[next(iter(self._results))]

    def expect(self, channel: str) -> None:
        """Learn that a message is delivered to a channel soon."""
        self.watch.watch(channel)

    def find_unusable(self, channels: Iterable[str]) -> str | None:
        """Return one of these channels that is not usable any more."""
        facts = self.watch.channels
        for each in channels:
            known = facts.get(each)
            if known is None or known.refusal or known.trouble:
                return each
        return None

    def check(self, position: RecordPosition, envelope: Envelope) -> ChannelCheck:
        """Return whether a message can be written to its channel, as far as that is known."""
        channel = envelope.channel
        self.watch.watch(channel)
        facts = self._facts.get(channel)
        if facts is None:
            return _UNKNOWN
        if facts.trouble is not None and facts.refusal is None:
            return self._unavailable(channel, facts.trouble)
        if facts.refusal is None and self._failures.get(position, 0) >= MOST_FAILURES:
            return ChannelCheck(ChannelStatus.REFUSED, f"topic {channel} has refused it {MOST_FAILURES} times")
        known = check_description(channel, facts, envelope, compresses=self._compresses)
        if known.status is ChannelStatus.REFUSED:
            return known
        is_doubtful = known.status is ChannelStatus.UNKNOWN or self._is_distrusted(channel)
        return self._tried(position, envelope) if is_doubtful else AVAILABLE

    def max_bytes_of(self, channel: str) -> int | None:
        """Return how many bytes a channel accepts at once; None is unknown, and each message must go alone."""
        facts = self._facts.get(channel)
        if facts is None or facts.max_message_bytes is None:
            return None if facts is None or self._is_distrusted(channel) else ASSUMED_MAX_BYTES
        return facts.max_message_bytes

    def has_failed(self, position: RecordPosition) -> bool:
        """Whether a message was refused before, alone or with others: it goes alone now, to find out."""
        return position in self._failures

    def note_failure(self, position: RecordPosition, channel: str, error: KafkaError) -> None:
        """Learn that a message was not stored."""
        if len(self._failures) > MANY_FAILURES:
            self._failures.clear()
        self._failures[position] = self._failures.get(position, 0) + 1
        self._distrust(channel)
        self._log_refusal(channel, error.str())
        self.watch.refresh_now()

    def forget(self, position: RecordPosition) -> None:
        """Forget the trial result of a message that has left the ladder; after an abort it is tried again."""
        self._results.pop(position, None)

    def forget_all(self) -> None:
        """Forget all messages: other dispatchers may have their partitions by now."""
        self._results.clear()
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

    def _tried(self, position: RecordPosition, envelope: Envelope) -> ChannelCheck:
        channel = envelope.channel
        answer = self._results.get(position)
        if answer is None:
            if position not in self._asked and len(self._asked) < MOST_ASKED:
                self._asked.add(position)
                self._trial.submit(position, envelope)
            return _UNKNOWN
        if answer.status is ChannelStatus.UNAVAILABLE:
            self.forget(position)
            return self._unavailable(channel, answer.reason)
        return answer

    def _unavailable(self, channel: str, reason: str) -> ChannelCheck:
        self._log_refusal(channel, reason)
        return ChannelCheck(ChannelStatus.UNAVAILABLE, reason)

    def _log_refusal(self, channel: str, reason: str) -> None:
        now = time.monotonic()
        if now > self._logged_until.get(channel, 0.0):
            self._logged_until[channel] = now + LOG_SECONDS
            log.warning("Topic %s refuses a message: %s", channel, reason)


def check_description(channel: str, facts: ChannelDescription, envelope: Envelope, *, compresses: bool) -> ChannelCheck:
    """Return what the description of a channel says about a message; UNKNOWN if only a trial can tell."""
    if facts.refusal is not None:
        return ChannelCheck(ChannelStatus.REFUSED, facts.refusal)
    if facts.trouble is not None:
        return ChannelCheck(ChannelStatus.UNAVAILABLE, facts.trouble)
    if facts.is_compacted and envelope.key is None:
        return ChannelCheck(
            ChannelStatus.REFUSED, f"key: topic {channel} is compacted and accepts no message without a key"
        )
    if facts.most_age_ms is not None and facts.most_age_ms < FRESH_MS:
        why = f"accepts only messages with a timestamp of the last {facts.most_age_ms} ms"
        hint = f"set message.timestamp.before.max.ms to {FRESH_MS} at least"
        return ChannelCheck(ChannelStatus.REFUSED, f"topic {channel} {why}; {hint}")
    most = facts.max_message_bytes
    if most is None or size_of(envelope) + BATCH_OVERHEAD_BYTES <= most:
        return AVAILABLE
    if compresses:
        return _UNKNOWN
    size = size_alone(envelope)
    if size > most:
        reason = f"payload: {size} bytes are too large for topic {channel}, which accepts {most}"
        return ChannelCheck(ChannelStatus.REFUSED, reason)
    return AVAILABLE


def size_of(envelope: Envelope) -> int:
    """Return the most bytes that the record of a message can have."""
    headers = envelope.record_headers()
    size = sum(len(name.encode()) + len(value) + HEADER_BYTES for name, value in headers)
    return size + len(envelope.payload) + len(envelope.key or b"") + RECORD_OVERHEAD_BYTES


def size_alone(envelope: Envelope) -> int:
    """Return the bytes of a batch with this message alone, as the broker counts them, without compression."""
    headers = envelope.record_headers()
    parts = [envelope.key or b"", envelope.payload, *(part for n, v in headers for part in (n.encode(), v))]
    # Attributes, time delta and offset delta: a byte each.
    size = 3 + sum(len(part) + _length_bytes(len(part)) for part in parts) + _length_bytes(len(headers))
    return BATCH_OVERHEAD_BYTES + size + _length_bytes(size)


def _length_bytes(length: int) -> int:
    """Return the bytes of a length field: seven bits each, and one bit for the sign."""
    return max(1, -(-(2 * length).bit_length() // 7))
