"""One Kafka transaction after another: everything that lanes give out, and their progress, all or nothing."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from airflow_delay_provider.brokers.kafka.dead_letter import MOST_BYTES, dead_letter_of
from airflow_delay_provider.brokers.kafka.destinations import BATCH_OVERHEAD_BYTES, PURGED, size_of
from airflow_delay_provider.brokers.kafka.journal_wire import is_answer
from airflow_delay_provider.brokers.kafka.lane import TAKE_BYTES, Opinion, Standing
from airflow_delay_provider.brokers.kafka.link import BATCH_BYTES

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from airflow_delay_provider.brokers.kafka import wire
    from airflow_delay_provider.brokers.kafka.commands import Place
    from airflow_delay_provider.brokers.kafka.destinations import Destinations
    from airflow_delay_provider.brokers.kafka.lane import Record
    from airflow_delay_provider.brokers.kafka.topology import Topology

#: How long a transaction may be open: readers of a channel see what is in it only when it ends.
OPEN_SECONDS_IF_AWAITED = 0.025
OPEN_SECONDS = 0.1
JOURNAL_RECORD_BYTES = 500_000
CALL_SECONDS = 10.0
GRACE_SECONDS = 2.0
#: Between two looks at what has become of records that are on their way.
SLICE_SECONDS = 0.05
#: How long an abort waits for records that are on their way before it is asked for again.
ABORT_SECONDS = 0.1


#: A channel that takes so much at once takes any batch of small messages.
WIDE_BYTES = 2 * BATCH_BYTES


class ChannelRefusedError(KafkaException):  # type: ignore[misc]  # the library has no types
    """A channel did not take a message; its messages are looked at one by one from now on."""


class RecordRefusedError(KafkaException):  # type: ignore[misc]  # the library has no types
    """A topic of the ladder did not take a record."""


class TransactionalOutlet:
    """Writes for all lanes of one dispatcher. A failure is left to the caller, who aborts and begins anew."""

    def __init__(self, producer: Producer, topology: Topology, destinations: Destinations) -> None:
        self._producer = producer
        self._topology = topology
        self._destinations = destinations
        self.expect = destinations.expect
        self._rungs = {hold_ms: topology.rung(hold_ms) for hold_ms in topology.ladder.holds_ms}
        self._begun_at: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._begun_at = None
        #: How many bytes are in it.
        self.size = 0
        #: Whether the broker was asked to commit: it may have done so, whatever is said.
        self.is_committing = False
        #: Whether there is an answer in it.
        self._is_awaited = False
        self._entries: dict[int, list[bytes]] = defaultdict(list)
        self.dispatched: Counter[str] = Counter()
        self.lateness_ms: list[int] = []
        #: Bytes in this transaction for each channel that takes less at once than a batch may have.
        self._narrow: dict[str, int] = {}
        #: Channels whose one message here was refused before.
        self._full: set[str] = set()
        #: Why records were not stored: of a channel, and of the ladder.
        self._refused: KafkaError | None = None
        self._broken: KafkaError | None = None

    @property
    def is_open(self) -> bool:
        """Whether a transaction is open."""
        return self._begun_at is not None

    def seconds_left(self) -> float:
        """Return how long the transaction may stay open."""
        if self._begun_at is None:
            return OPEN_SECONDS
        if self.size >= TAKE_BYTES:
            return 0.0
        most = OPEN_SECONDS_IF_AWAITED if self.lateness_ms or self._is_awaited else OPEN_SECONDS
        return self._begun_at + most - time.monotonic()

    # -- what lanes give out -------------------------------------------------------------------------------------

    def rest(self, lane: int, hold_ms: int, key: bytes, value: bytes) -> None:
        """Put an envelope into a rung."""
        self._produce(self._rungs[hold_ms], value, key, lane)

    def deliver(self, place: Place, envelope: wire.Envelope, now_ms: int) -> None:
        """Put a message into its channel."""
        channel = envelope.channel

        def on_failure(error: KafkaError | None, _record: Any, place: Place = place) -> None:
            if error is not None and error.code() not in PURGED:
                self._refused = error
                self._destinations.note_failure(place, channel, error)

        if self._destinations.has_failed(place):
            self._full.add(channel)
        elif self._room_of(channel) < WIDE_BYTES:
            self._narrow[channel] = self._narrow.get(channel, BATCH_OVERHEAD_BYTES) + size_of(envelope)
        self._produce(
            channel, envelope.payload, envelope.key, headers=envelope.record_headers(), on_delivery=on_failure
        )
        self._destinations.settle(place)
        self.dispatched[channel] += 1
        self.lateness_ms.append(now_ms - envelope.deliver_at_ms)

    def judge(self, place: Place, envelope: wire.Envelope) -> Opinion:
        """Say whether a message can be put into its channel; not into one that takes no more in this transaction."""
        opinion = self._destinations.judge(place, envelope)
        if opinion.standing is Standing.GOOD and not self._has_room(place, envelope):
            return Opinion(Standing.UNKNOWN)
        return opinion

    def _has_room(self, place: Place, envelope: wire.Envelope) -> bool:
        channel = envelope.channel
        if channel in self._full or (self.dispatched[channel] and self._destinations.has_failed(place)):
            return False
        return channel not in self._narrow or self._narrow[channel] + size_of(envelope) <= self._room_of(channel)

    def _room_of(self, channel: str) -> int:
        return self._destinations.room_of(channel) or 0

    def bury(self, place: Place, record: Record, reason: str, *, most_bytes: int = MOST_BYTES) -> None:
        """Put a record that cannot be delivered into the topic of the dead, as a message where it is one."""
        self._destinations.settle(place)
        key, value, headers = dead_letter_of(place, record, reason, most_bytes=most_bytes)
        self._produce(self._topology.dead, value, key, headers=headers)

    def tell(self, lane: int, entry: bytes) -> None:
        """Write an entry into the journal; those of one transaction share a record."""
        self._begin()
        self.size += len(entry)
        self._entries[lane].append(entry)
        self._is_awaited = self._is_awaited or is_answer(entry)

    def remember(self, place: Place, *, recalled: bool) -> None:
        """Remember that a record is to be passed over, or forget it."""
        self._produce(self._topology.recalls, b"1" if recalled else None, place.key(), place.lane)

    # -- ending --------------------------------------------------------------------------------------------------

    def commit(self, progress: Iterable[tuple[str, int, int, str]], group: Any) -> None:
        """Make everything visible together with the progress (topic, lane, offset, note) of this group."""
        self._begin()
        for lane, entries in self._entries.items():
            for value in _joined(entries):
                self._produce(self._topology.journal, value, None, lane)
        offsets = [TopicPartition(topic, lane, offset, note) for topic, lane, offset, note in progress]
        self._await_records()
        if offsets:
            until_done(lambda seconds: self._producer.send_offsets_to_transaction(offsets, group, seconds))
        self.is_committing = True
        until_done(self._producer.commit_transaction)
        self._reset()

    def _await_records(self) -> None:
        """Wait until all records are stored; a channel that is gone by now is not waited for."""
        deadline = time.monotonic() + CALL_SECONDS
        while self._producer.flush(SLICE_SECONDS):
            if self._refused is not None or self._broken is not None or time.monotonic() > deadline:
                break
            if (channel := self._destinations.is_lost(self.dispatched)) is not None:
                self._refused = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, f"topic {channel} cannot be used any more")
                break
        if self._broken is not None:
            raise RecordRefusedError(self._broken)
        if self._refused is not None:
            raise ChannelRefusedError(self._refused)

    def abort(self) -> None:
        """Make everything since the last commit undone; while that fails, nothing new can be begun."""
        if self._begun_at is not None:
            # Each call lets go of what is to be sent again: to a topic that is gone that would be for two seconds.
            until_done(lambda seconds: self._producer.abort_transaction(min(seconds, ABORT_SECONDS)))
            self._reset()

    def give_up(self) -> None:
        """Send nothing more. The broker undoes what is open when it has taken too long, or for the next of our name."""
        self._producer.purge(blocking=False)

    # -- pieces --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._begun_at is None:
            self._producer.begin_transaction()
            self._begun_at = time.monotonic()

    def _produce(self, topic: str, value: bytes | None, key: bytes | None, partition: int = -1, **options: Any) -> None:
        self._begin()
        self.size += (
            len(value or b"") + len(key or b"") + sum(len(each[1] or b"") for each in options.get("headers", ()))
        )
        options.setdefault("on_delivery", self._on_broken)
        while True:
            try:
                self._producer.produce(topic, value, key, partition, **options)
            except BufferError:
                self._producer.poll(0.05)
            else:
                return

    def _on_broken(self, error: KafkaError | None, _record: Any) -> None:
        if error is not None and error.code() not in PURGED:
            self._broken = error


def _joined(entries: list[bytes]) -> Iterable[bytes]:
    part: list[bytes] = []
    size = 0
    for entry in entries:
        if part and size + len(entry) > JOURNAL_RECORD_BYTES:
            yield b"".join(part)
            part, size = [], 0
        part.append(entry)
        size += len(entry)
    if part:
        yield b"".join(part)


def until_done(call: Callable[[float], Any]) -> None:
    """Go on with a call that the library says can be gone on with, for as long as a transaction may take."""
    deadline = time.monotonic() + CALL_SECONDS
    while True:
        try:
            _returning(call, max(0.1, deadline - time.monotonic()))
        except KafkaException as error:
            if not error.args[0].retriable() or time.monotonic() > deadline:
                raise
        else:
            return


def _returning(call: Callable[[float], Any], seconds: float) -> None:
    """Make a call that may not return, in a thread that is left behind then.

    The library waits for a node that it has given up, whatever time it is given, when that was the group's coordinator
    (librdkafka issue 5511): all dispatchers would wait with it, since lanes are shared by common consent.
    """
    ended: Future[None] = Future()

    def run() -> None:
        try:
            ended.set_result(call(seconds))
        except BaseException as error:  # noqa: BLE001 - raised where the call is waited for
            ended.set_exception(error)

    threading.Thread(target=run, name="delay-kafka-call", daemon=True).start()
    try:
        ended.result(seconds + GRACE_SECONDS)
    except TimeoutError:
        error = KafkaError(KafkaError._TIMED_OUT, "the client library waits in vain", fatal=True)
        raise KafkaException(error) from None
