"""Partition N of all topics of a ladder: what to do with its records, and when. No I/O.

A partition processes its records in log order, writes the results into a transaction, and always knows which records
are done. The dispatcher commits both in one transaction. After a crash the partition is rebuilt from the last commit,
so nothing is repeated or skipped, whatever was in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush

from airflow_delay_provider.brokers.kafka import header_protocol, wire
from airflow_delay_provider.brokers.kafka.dispatch.channel_status import ChannelStatus
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import SLACK_MS, PartitionQueue, Record
from airflow_delay_provider.brokers.kafka.dispatch.transaction import TAKE_BYTES, Transaction
from airflow_delay_provider.brokers.kafka.journal import encode_entry, encode_left, encode_result, encode_scheduled
from airflow_delay_provider.brokers.kafka.progress import note_of
from airflow_delay_provider.brokers.kafka.recall import Command, RecordPosition
from airflow_delay_provider.brokers.kafka.topology import MAX_VALUE_BYTES
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.ladder import Ladder

#: Most messages in memory that are due within the tick and the slack; more of them wait in their topics.
MAX_DUE_SOON = 50_000
MAX_DUE_SOON_BYTES = 64 * 1024 * 1024
#: Most messages in memory whose channels are being checked; more of them wait in a rung again. They leave room for
#: messages of other channels.
MANY_UNKNOWN = 10_000
MANY_UNKNOWN_BYTES = 16 * 1024 * 1024
#: Bytes of an unreadable command that are kept as a dead letter.
COMMAND_CUT_BYTES = 1_000
#: How long a message waits again if its channel is unavailable.
UNAVAILABLE_MS = 10_000
#: No more messages are delivered in a transaction of this size.
DELIVER_BYTES = 4_000_000
#: How soon an unknown channel is checked again.
CHECK_AGAIN_MS = 20


class Partition:
    """The queues of one partition number.

    Guarantees, for any sequence of crashes between two commits: each message is delivered once, and never before it is
    due by the clock of the dispatcher; a message whose recall was answered with "accepted" is not delivered by the
    record that was recalled.
    """

    def __init__(
        self,
        number: int,
        ladder: Ladder,
        queues: Mapping[str, PartitionQueue],
        *,
        inbox: str,
        control: str,
        recalled: Iterable[RecordPosition] = (),
    ) -> None:
        self.number = number
        self.queues = dict(queues)
        self._ladder = ladder
        self._inbox = inbox
        self._control = control
        for position in recalled:
            if position.topic in self.queues:
                self.queues[position.topic].recalled.add(position.offset)
        #: Messages that are due soon: due time, order of arrival, and the record that contains them.
        self._due_soon: list[tuple[int, int, PartitionQueue, Record]] = []
        self._arrivals = 0
        #: Messages that are due and whose channels are unknown, and when those are checked again.
        self._unknown: list[tuple[int, int, PartitionQueue, Record]] = []
        self._check_again_ms = 0
        #: Bytes of both, and of the second.
        self._held_bytes = self._unknown_bytes = 0
        #: Their channels and keys: later messages of the same key must not overtake them.
        self._unknown_keys: set[tuple[str, bytes]] = set()
        self._current: RecordPosition | None = None

    @property
    def current(self) -> RecordPosition | None:
        """The record that was processed last."""
        return self._current

    def process_ready(self, transaction: Transaction, now_ms: int, *, limit: int) -> int:
        """Process records whose hold time is over, ``limit`` at most, and return how many."""
        steps = 0
        for queue in self.queues.values():
            most = transaction.size + TAKE_BYTES
            while queue.waiting and steps < limit and transaction.size < most and self._may_process(queue, now_ms):
                steps += 1
                self._process(queue, transaction, now_ms)
        return steps

    def deliver_due(self, transaction: Transaction, now_ms: int, *, limit: int) -> int:
        """Deliver messages that are due, ``limit`` at most, and return how many."""
        due_soon, delivered, checked_again = self._due_soon, 0, len(self._unknown)
        if self._unknown and now_ms >= self._check_again_ms:
            for due in self._unknown:
                heappush(due_soon, due)
            self._unknown.clear()
            self._unknown_keys.clear()
            self._unknown_bytes = 0
        while due_soon and due_soon[0][0] <= now_ms and delivered < limit and transaction.size < DELIVER_BYTES:
            due = heappop(due_soon)
            _, _, queue, record = due
            size = len(record.value or b"")
            self._held_bytes -= size
            # A record that is done by now was recalled.
            if record.offset not in queue.progress.open:
                continue
            self._current = queue.position(self.number, record.offset)
            if not self._deliver(queue, record, transaction, now_ms):
                if not self._unknown:
                    # The more there were, the longer it takes to check all of them.
                    self._check_again_ms = now_ms + max(CHECK_AGAIN_MS, checked_again // 4)
                self._unknown.append(due)
                self._unknown_bytes += size
                self._held_bytes += size
            else:
                delivered += 1
                queue.end(record.offset)
        return delivered

    def next_ready_ms(self) -> int | None:
        """Return when there is something to do next, as far as known; None is nothing."""
        moments = [self._due_soon[0][0]] if self._due_soon else []
        if self._unknown:
            moments.append(self._check_again_ms)
        if self._has_room():
            reading = [each for each in self.queues.values() if each.waiting]
            moments += [each.next_ready_ms() for each in reading if each.has_room()]
        return min(moments, default=None)

    def progress(self) -> Iterator[tuple[str, int, str]]:
        """Return the topic, offset and note of each queue that has progress to commit."""
        for queue in self.queues.values():
            if queue.is_changed:
                yield queue.topic, queue.progress.low, note_of(queue.progress, queue.topic_id)

    def committed(self) -> None:
        """Learn that everything up to now is committed."""
        for queue in self.queues.values():
            queue.committed()

    def roll_back(self) -> None:
        """Return to the state of the last commit, without fetching records again."""
        self._due_soon.clear()
        self._unknown.clear()
        self._unknown_keys.clear()
        self._held_bytes = self._unknown_bytes = 0
        for queue in self.queues.values():
            queue.roll_back()

    # -- steps ---------------------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        return len(self._due_soon) + len(self._unknown) < MAX_DUE_SOON and self._held_bytes < MAX_DUE_SOON_BYTES

    def _has_many_unknown(self) -> bool:
        return len(self._unknown) >= MANY_UNKNOWN or self._unknown_bytes >= MANY_UNKNOWN_BYTES

    def _may_process(self, queue: PartitionQueue, now_ms: int) -> bool:
        if not queue.has_room() or not self._has_room():
            return False
        return queue.next_ready_ms() <= now_ms or queue.is_misplaced(queue.waiting[0], now_ms)

    def _process(self, queue: PartitionQueue, transaction: Transaction, now_ms: int) -> None:
        record = queue.waiting[0]
        position = self._current = queue.position(self.number, record.offset)
        # Begun before a crash: its journal entries and answers were committed then, only its message is still here.
        again = record.offset < queue.progress.next
        if not queue.begin(record.offset):
            return
        if record.offset in queue.recalled:
            queue.recall(record.offset, recalled=False)
            transaction.record_recall(position, recalled=False)
            queue.end(record.offset)
        elif record.offset in queue.given_up:
            self._give_up(queue, record, transaction, now_ms, again=again)
        elif queue.topic == self._control:
            self._execute(queue, record, transaction, now_ms, again=again)
        elif queue.topic == self._inbox:
            self._accept(queue, record, transaction, now_ms, again=again)
        else:
            self._hold(queue, record, transaction, now_ms)

    def _hold(self, queue: PartitionQueue, record: Record, transaction: Transaction, now_ms: int) -> None:
        """Put an envelope into its next rung, or keep it in memory for its last moments."""
        key, value = record.key, record.value
        wrong = _find_wrong(record, queue.topic)
        if wrong is not None or key is None or value is None:
            transaction.dead_letter(queue.position(self.number, record.offset), record, wrong or "")
            queue.end(record.offset)
            return
        due_ms = wire.held_until_ms(key)
        hold_ms = self._ladder.next_hold(due_ms - now_ms - SLACK_MS)
        if hold_ms is not None:
            transaction.put_into_rung(self.number, hold_ms, key, value)
            queue.end(record.offset)
        else:
            self._arrivals += 1
            heappush(self._due_soon, (due_ms, self._arrivals, queue, record))
            self._held_bytes += len(value)
            if channel := wire.channel_of(value):
                transaction.expect(channel)

    def _accept(
        self, queue: PartitionQueue, record: Record, transaction: Transaction, now_ms: int, *, again: bool
    ) -> None:
        """Accept what was scheduled: an envelope of this package, or a plain record with headers."""
        try:
            accepted = self._read_inbox(queue, record)
            envelope = wire.Envelope(accepted.key or b"", accepted.value or b"")
            envelope.check()
            entry = encode_scheduled(envelope, accepted.value or b"")
        except Exception as error:  # noqa: BLE001 - any program may write to the inbox, and none may stop it
            transaction.dead_letter(queue.position(self.number, record.offset), record, _text_of(error))
            queue.end(record.offset)
            return
        if not again:
            transaction.record_entry(self.number, entry)
        self._hold(queue, accepted, transaction, now_ms)

    def _read_inbox(self, queue: PartitionQueue, record: Record) -> Record:
        """Return the envelope that a record in the inbox is or asks for."""
        if record.size > MAX_VALUE_BYTES:
            raise InvalidMessageError(
                "payload", f"{record.size} bytes are too many for the ladder", f"send {MAX_VALUE_BYTES} at most"
            )
        if record.headers:
            return self._enveloped(queue, record)
        if record.key is None or len(record.key) < 9 or record.value is None:
            required = f"name at least {header_protocol.CHANNEL} and {header_protocol.DELIVER_AT}"
            raise InvalidMessageError("headers", "are missing", required)
        return record

    def _enveloped(self, queue: PartitionQueue, record: Record) -> Record:
        key, value = wire.encode_request(
            default_id=f"{queue.topic}-{self.number}-{record.offset}",
            key=record.key,
            value=record.value,
            headers=record.headers or [],
            timestamp_ms=record.timestamp_ms,
        )
        return Record(record.offset, record.timestamp_ms, key, value)

    def _execute(
        self, queue: PartitionQueue, record: Record, transaction: Transaction, now_ms: int, *, again: bool
    ) -> None:
        """Recall a record that is not done, and answer whether that was possible."""
        try:
            command = Command.decode(record.value or b"")
        except ValueError as error:
            # A command is never replayed, so its beginning is enough.
            transaction.dead_letter(
                queue.position(self.number, record.offset), record, _text_of(error), most_bytes=COMMAND_CUT_BYTES
            )
            queue.end(record.offset)
            return
        if (again or self._recall(command, transaction, now_ms)) and command.envelope:
            key = wire.encode_key(command.deliver_at_ms, command.message_id)
            self._hold(queue, Record(record.offset, record.timestamp_ms, key, command.envelope), transaction, now_ms)
        else:
            queue.end(record.offset)

    def _recall(self, command: Command, transaction: Transaction, now_ms: int) -> bool:
        position, target = command.position, self.queues.get(command.position.topic)
        waits = target is not None and position.partition == self.number and target.is_waiting(position.offset)
        transaction.record_entry(self.number, encode_result(command.id, at_ms=now_ms, accepted=waits))
        if target is None or not waits:
            return False
        unrecorded = b""
        if position.offset in target.progress.open:
            target.end(position.offset)
        else:
            target.recall(position.offset, recalled=True)
            transaction.record_recall(position, recalled=True)
            if position.topic == self._inbox:
                # The journal does not contain the message yet, and skipping the record will not add it.
                unrecorded = command.envelope
        entry = encode_entry(
            command.change,
            at_ms=now_ms,
            deliver_at_ms=command.deliver_at_ms,
            message_id=command.message_id.encode(),
            channel=command.channel,
            envelope=unrecorded,
        )
        transaction.record_entry(self.number, entry)
        return True

    def _deliver(self, queue: PartitionQueue, record: Record, transaction: Transaction, now_ms: int) -> bool:
        """Deliver a message and return whether it is done; it is not while the status of its channel is unknown."""
        position, key, value = queue.position(self.number, record.offset), record.key or b"", record.value or b""
        try:
            envelope = wire.Envelope(key, value)
            envelope.check()
        except Exception as error:  # noqa: BLE001 - whatever it is, the messages behind it must not wait for it
            transaction.dead_letter(position, record, _text_of(error))
            return True
        status, reason = transaction.check(position, envelope)
        order = None if envelope.key is None else (envelope.channel, envelope.key)
        if status is ChannelStatus.UNKNOWN and (self._has_many_unknown() or queue.is_crowded()):
            status = ChannelStatus.UNAVAILABLE
        elif status is ChannelStatus.UNKNOWN or order in self._unknown_keys:
            if order is not None:
                self._unknown_keys.add(order)
            return False
        if status is ChannelStatus.UNAVAILABLE:
            until_ms = now_ms + UNAVAILABLE_MS
            hold_ms = self._ladder.next_hold(UNAVAILABLE_MS - SLACK_MS) or self._ladder.tick_ms
            key = wire.encode_key(until_ms, wire.message_id_of(key))
            transaction.put_into_rung(self.number, hold_ms, key, value)
            return True
        if status is ChannelStatus.REFUSED:
            transaction.dead_letter(position, record, reason)
            transaction.record_entry(self.number, encode_left(envelope, now_ms, refusal=reason))
        else:
            transaction.deliver(position, envelope, now_ms)
            transaction.record_entry(self.number, encode_left(envelope, now_ms))
        return True

    def _give_up(
        self, queue: PartitionQueue, record: Record, transaction: Transaction, now_ms: int, *, again: bool
    ) -> None:
        """Dead-letter a record that could not be processed, and record that in the journal if it is a message."""
        reason, has_content = queue.given_up[record.offset]
        kept = record if has_content else Record(record.offset, record.timestamp_ms, None, None)
        transaction.dead_letter(queue.position(self.number, record.offset), kept, reason)
        queue.end(record.offset)
        try:
            if queue.topic == self._inbox and record.headers:
                record = self._enveloped(queue, record)
            envelope = wire.Envelope(record.key or b"", record.value or b"")
            envelope.check()
        except Exception:  # noqa: BLE001 - it is not a message
            return
        if queue.topic == self._inbox and not again:
            transaction.record_entry(self.number, encode_scheduled(envelope, record.value or b""))
        transaction.record_entry(self.number, encode_left(envelope, now_ms, refusal=reason))


def _find_wrong(record: Record, topic: str) -> str | None:
    """Return why a record cannot wait in the ladder."""
    key, value = record.key, record.value
    if key is None or value is None or len(key) < 9:
        return f"the record at offset {record.offset} of {topic} is not a message of this ladder"
    if len(key) + len(value) > MAX_VALUE_BYTES:
        return f"payload: {len(key) + len(value)} bytes are too many for the ladder; send {MAX_VALUE_BYTES} at most"
    if wire.held_until_ms(key) > header_protocol.MAX_MS:
        return f"deliver_at: {wire.held_until_ms(key)} is out of range; use milliseconds since 1970"
    return None


def _text_of(error: Exception) -> str:
    """Return the text of an error; some have none."""
    return str(error) or type(error).__name__
