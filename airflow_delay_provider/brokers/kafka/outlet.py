"""One Kafka transaction after another: everything that lanes give out, and their progress, all or nothing."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.errors import DENIED, MISSING, UNFIT
from airflow_delay_provider.brokers.kafka.journal_wire import is_answer
from airflow_delay_provider.domain.lifecycle import Change

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from airflow_delay_provider.brokers.kafka.commands import Place
    from airflow_delay_provider.brokers.kafka.lane import Record
    from airflow_delay_provider.brokers.kafka.topology import Topology

#: How long a transaction may be open: readers of a channel see what is in it only when it ends.
OPEN_SECONDS_IF_AWAITED = 0.025
OPEN_SECONDS = 0.1
JOURNAL_RECORD_BYTES = 500_000
#: How long it is believed that a channel is there, or is not.
BELIEVE_SECONDS = 30.0
DOUBT_SECONDS = 5.0
CALL_SECONDS = 10.0
GRACE_SECONDS = 2.0
#: Why a channel cannot be written to; anything else that is said of it may pass.
_LASTING = MISSING | DENIED | {KafkaError.TOPIC_EXCEPTION}


class Refusals:
    """Channels and messages that the broker does not take, learned from its answers; kept over transactions."""

    def __init__(self) -> None:
        self.messages: dict[bytes, str] = {}
        #: Whether a channel can be written to, and until when that is believed.
        self.channels: dict[str, tuple[float, str | None]] = {}
        #: Channels that refused a batch because of one message in it, not known which, and until when that matters.
        self.singly: dict[str, float] = {}

    def note(self, channel: str, message_id: bytes, error: KafkaError, *, was_alone: bool) -> None:
        """Learn from a record that was not stored, alone or because of another one in its batch."""
        if error.code() in MISSING | {KafkaError._MSG_TIMED_OUT}:
            # Gone, or the library is mistaken after a broker was started again: asked for before the next record.
            self.channels.pop(channel, None)
        elif error.code() in DENIED:
            self.channels[channel] = (time.monotonic() + BELIEVE_SECONDS, error.str())
        elif error.code() in UNFIT and was_alone:
            self.messages[message_id] = error.str()
        elif error.code() in UNFIT:
            self.singly[channel] = time.monotonic() + BELIEVE_SECONDS


class TransactionalOutlet:
    """Writes for all lanes of one dispatcher. A failure is left to the caller, who aborts and begins anew."""

    def __init__(self, producer: Producer, topology: Topology, refusals: Refusals) -> None:
        self._producer = producer
        self._topology = topology
        self._refusals = refusals
        self._rungs = {hold_ms: topology.rung(hold_ms) for hold_ms in topology.ladder.holds_ms}
        self._begun_at: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._begun_at = None
        #: Whether there is an answer in it.
        self._is_awaited = False
        self._entries: dict[int, list[bytes]] = defaultdict(list)
        self.dispatched: Counter[str] = Counter()
        self.lateness_ms: list[int] = []

    @property
    def is_open(self) -> bool:
        """Whether a transaction is open."""
        return self._begun_at is not None

    def seconds_left(self) -> float:
        """Return how long the transaction may stay open."""
        if self._begun_at is None:
            return OPEN_SECONDS
        most = OPEN_SECONDS_IF_AWAITED if self.lateness_ms or self._is_awaited else OPEN_SECONDS
        return self._begun_at + most - time.monotonic()

    # -- what lanes give out -------------------------------------------------------------------------------------

    def rest(self, lane: int, hold_ms: int, key: bytes, value: bytes) -> None:
        """Put an envelope into a rung."""
        self._produce(self._rungs[hold_ms], value, key, lane)

    def deliver(self, lane: int, envelope: wire.Envelope, now_ms: int) -> str | None:  # noqa: ARG002 - the protocol's
        """Put a message into its channel, or say why it cannot be put there."""
        channel, refusals = envelope.channel, self._refusals
        refusal = refusals.messages.get(envelope.message_id) or self._channel_refusal(channel)
        if refusal is not None:
            return refusal

        was_alone = time.monotonic() < refusals.singly.get(channel, 0.0)

        def on_failure(error: KafkaError | None, _record: Any, message_id: bytes = envelope.message_id) -> None:
            if error is not None:
                refusals.note(channel, message_id, error, was_alone=was_alone)

        self._produce(
            channel, envelope.payload, envelope.key, headers=envelope.record_headers(), on_delivery=on_failure
        )
        if was_alone:
            self._producer.flush(CALL_SECONDS)
        self.dispatched[channel] += 1
        self.lateness_ms.append(now_ms - envelope.deliver_at_ms)
        return None

    def bury(self, record: Record, reason: str) -> None:
        """Put a record that cannot be delivered into the topic of the dead, as a message where it is one."""
        why: wire.Headers = [
            (wire.CHANGE, Change.DEAD_LETTERED.value.encode()),
            (wire.REASON, wire.clean_reason(reason).encode()),
        ]
        try:
            envelope = wire.Envelope(record.key or b"", record.value or b"")
        except Exception:  # noqa: BLE001 - it may be anything
            self._produce(self._topology.dead, record.value, record.key, headers=[*(record.headers or []), *why])
            return
        where = (wire.CHANNEL, envelope.channel.encode())
        headers = [*envelope.record_headers(), where, *why]
        self._produce(self._topology.dead, envelope.payload, envelope.key, headers=headers)

    def tell(self, lane: int, entry: bytes) -> None:
        """Write an entry into the journal; those of one transaction share a record."""
        self._begin()
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
        if offsets:
            _until_done(lambda seconds: self._producer.send_offsets_to_transaction(offsets, group, seconds))
        _until_done(self._producer.commit_transaction)
        # They are buried now, and their ids may come again with what fits.
        self._refusals.messages.clear()
        self._reset()

    def abort(self) -> None:
        """Make everything since the last commit undone; while that fails, nothing new can be begun."""
        if self._begun_at is not None:
            _until_done(self._producer.abort_transaction)
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
        while True:
            try:
                self._producer.produce(topic, value, key, partition, **options)
            except BufferError:
                self._producer.poll(0.05)
            else:
                return

    def _channel_refusal(self, channel: str) -> str | None:
        """Say why a channel cannot be written to: one bad record would spoil the whole transaction."""
        known = self._refusals.channels.get(channel)
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        topics = self._producer.list_topics(channel, CALL_SECONDS).topics
        error = topics[channel].error if channel in topics else None
        refusal = f"topic {channel}: {error.str()}" if error is not None and error.code() in _LASTING else None
        believe = BELIEVE_SECONDS if refusal is None else DOUBT_SECONDS
        self._refusals.channels[channel] = (time.monotonic() + believe, refusal)
        return refusal


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


def _until_done(call: Callable[[float], Any]) -> None:
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
