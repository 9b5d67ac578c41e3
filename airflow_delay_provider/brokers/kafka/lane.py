"""One lane of the ladder: what to do with its records, and when; pure, no I/O.

A lane reads its records in the order of their topics' logs, gives out what follows from them, and knows at any moment
which records are done. Whoever runs it writes both in one transaction. After a crash the lane is built again from what
was committed last, so nothing is done twice or left out, whatever was in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.commands import Command, Place
from airflow_delay_provider.brokers.kafka.journal_wire import write_answer, write_entry
from airflow_delay_provider.brokers.kafka.progress import Progress
from airflow_delay_provider.brokers.kafka.topology import COVER_MS, MAX_RECORD_BYTES
from airflow_delay_provider.domain.clock import ceil_ms
from airflow_delay_provider.domain.ladder import Ladder
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.exceptions import InvalidMessageError

#: How long before it is due a message has left its last rung, so that messages are given out in the order of their due
#: times, whatever ways they came.
SLACK_MS = 500
#: Most messages of a lane in memory that are due within the tick and the slack; more wait in their topics.
MAX_HELD = 50_000


#: What is larger came in compressed and could be written nowhere.
MAX_VALUE_BYTES = MAX_RECORD_BYTES - 500_000


class Record(NamedTuple):
    """What is read of a Kafka record."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: wire.Headers | None = None


class Outlet(Protocol):
    """Where everything goes that a lane gives out; in one transaction with its progress."""

    def rest(self, lane: int, hold_ms: int, key: bytes, value: bytes) -> None:
        """Put an envelope into a rung."""
        ...

    def deliver(self, lane: int, envelope: wire.Envelope, now_ms: int) -> str | None:
        """Put a message into its channel, or say why it cannot be put there."""
        ...

    def bury(self, record: Record, reason: str) -> None:
        """Put a record that cannot be delivered into the topic of the dead."""
        ...

    def tell(self, lane: int, entry: bytes) -> None:
        """Write an entry into the journal."""
        ...

    def remember(self, place: Place, *, recalled: bool) -> None:
        """Remember that a record is to be passed over, or forget it."""
        ...


class Source:
    """One partition that a lane reads: fetched records whose turn has not come, and which ones are done."""

    __slots__ = ("hold_ms", "is_changed", "progress", "recalled", "topic", "waiting")

    def __init__(self, topic: str, hold_ms: int, progress: Progress) -> None:
        self.topic = topic
        #: How long records rest here; 0 is not at all.
        self.hold_ms = hold_ms
        self.progress = progress
        self.waiting: deque[Record] = deque()
        #: Offsets of records that are passed over when their turn comes.
        self.recalled: set[int] = set()
        #: Whether there is progress to be committed.
        self.is_changed = False

    def begin(self, offset: int) -> bool:
        """Take the next record and return whether there is anything to do for it."""
        self.waiting.popleft()
        self.is_changed = True
        return self.progress.begin(offset)

    def end(self, offset: int) -> None:
        """Note that a record is done."""
        self.progress.end(offset)
        self.is_changed = True

    def is_waiting(self, offset: int) -> bool:
        """Whether a record is still to be given out."""
        return self.progress.is_waiting(offset) and offset not in self.recalled

    def has_room(self) -> bool:
        """Whether the next record may be begun before another one ends."""
        return bool(self.waiting) and self.progress.has_room_for(self.waiting[0].offset)

    def turn_ms(self, record: Record) -> int:
        """Return when a record's turn comes: after its rest, as far as the broker's clock agrees with ours.

        Where that runs ahead, it comes before its message would be late. Where that runs behind, it comes when the next
        rest is a shorter one: what was put here had less than two such rests ahead, or it would be in a longer one.
        That cannot be said of the longest ones, in which messages rest several times.
        """
        if not self.hold_ms or record.key is None:
            return 0
        rested_ms, latest_ms = record.timestamp_ms + self.hold_ms, wire.held_until_ms(record.key) - SLACK_MS
        if self.hold_ms <= COVER_MS // 2:
            rested_ms = max(rested_ms, latest_ms - self.hold_ms + 1)
        return min(rested_ms, latest_ms)


class Lane:
    """All partitions of one number.

    Guarantees, for any order of crashes between two commits: each message is given out once, and never before it is due
    by the clock of whoever runs the lane; a message whose recall was answered with "obeyed" is not given out by the
    record that was recalled.
    """

    def __init__(
        self,
        number: int,
        ladder: Ladder,
        sources: Mapping[str, Source],
        *,
        inbox: str,
        control: str,
        recalled: Iterable[Place] = (),
    ) -> None:
        self.number = number
        self.sources = dict(sources)
        self._ladder = ladder
        self._inbox = inbox
        self._control = control
        for place in recalled:
            if place.topic in self.sources:
                self.sources[place.topic].recalled.add(place.offset)
        #: Messages that are due soon: due time, order of coming, and the record they come from.
        self._held: list[tuple[int, int, Source, Record]] = []
        self._arrivals = 0

    def advance(self, out: Outlet, now_ms: int, *, limit: int) -> int:
        """Do what there is to do at ``now_ms``, up to about ``limit`` steps, and return how many were done."""
        steps = 0
        for source in self.sources.values():
            while source.waiting and steps < limit and self._may_take(source, now_ms):
                steps += 1
                self._take(source, out, now_ms)
        return steps + self._fire(out, now_ms, limit)

    def next_turn_ms(self) -> int | None:
        """Return when there is something to do next, as far as known; None is nothing."""
        turns = [self._held[0][0]] if self._held else []
        if len(self._held) < MAX_HELD:
            reading = [each for each in self.sources.values() if each.waiting]
            turns += [each.turn_ms(each.waiting[0]) for each in reading if each.has_room()]
        return min(turns, default=None)

    def progress(self) -> Iterator[tuple[str, int, str]]:
        """Return the topic, offset and note of each source that has something to commit."""
        for source in self.sources.values():
            if source.is_changed:
                yield source.topic, source.progress.low, source.progress.note()

    def committed(self) -> None:
        """Note that everything up to now is committed."""
        for source in self.sources.values():
            source.is_changed = False

    # -- steps ---------------------------------------------------------------------------------------------------

    def _may_take(self, source: Source, now_ms: int) -> bool:
        return source.has_room() and source.turn_ms(source.waiting[0]) <= now_ms and len(self._held) < MAX_HELD

    def _take(self, source: Source, out: Outlet, now_ms: int) -> None:
        record = source.waiting[0]
        # Begun before a crash: what had to be said of it was said then, only its message is still to be given out.
        again = record.offset < source.progress.next
        if not source.begin(record.offset):
            return
        if record.offset in source.recalled:
            source.recalled.discard(record.offset)
            out.remember(Place(topic=source.topic, lane=self.number, offset=record.offset), recalled=False)
            source.end(record.offset)
        elif source.topic == self._control:
            self._obey(source, record, out, now_ms, again=again)
        elif source.topic == self._inbox:
            self._accept(source, record, out, now_ms, again=again)
        else:
            self._place(source, record, out, now_ms)

    def _place(self, source: Source, record: Record, out: Outlet, now_ms: int) -> None:
        """Send an envelope to its next rest, or hold it here for its last moments."""
        key, value = record.key, record.value
        if key is None or value is None or len(key) < 9:
            out.bury(record, f"what lies in {source.topic} at {record.offset} is no message of this ladder")
            source.end(record.offset)
            return
        due_ms = wire.held_until_ms(key)
        hold_ms = self._ladder.next_hold(due_ms - now_ms - SLACK_MS)
        if hold_ms is not None:
            out.rest(self.number, hold_ms, key, value)
            source.end(record.offset)
        else:
            self._arrivals += 1
            heappush(self._held, (due_ms, self._arrivals, source, record))

    def _accept(self, source: Source, record: Record, out: Outlet, now_ms: int, *, again: bool) -> None:
        """Take in what was scheduled: an envelope of ours, or a plain record with headers."""
        try:
            if len(record.value or b"") > MAX_VALUE_BYTES:
                size, record = len(record.value or b""), record._replace(value=b"")
                raise InvalidMessageError(
                    "payload", f"{size} bytes are too many for the ladder", f"send {MAX_VALUE_BYTES} at most"
                )
            if record.headers:
                record = self._enveloped(record, f"{source.topic}-{self.number}-{record.offset}")
            elif record.key is None or len(record.key) < 9 or record.value is None:
                raise InvalidMessageError(
                    "headers", "are missing", f"name at least {wire.CHANNEL} and {wire.DELIVER_AT}"
                )
            envelope = wire.Envelope(record.key or b"", record.value or b"")
            entry = _scheduled(envelope, record.value or b"")
        except Exception as error:  # noqa: BLE001 - anybody may write to the inbox, and nobody may stop it by that
            out.bury(record, str(error))
            source.end(record.offset)
            return
        if not again:
            out.tell(self.number, entry)
        self._place(source, record, out, now_ms)

    def _enveloped(self, record: Record, position: str) -> Record:
        message = wire.read_request(
            position=position,
            key=record.key,
            value=record.value,
            headers=record.headers or [],
            timestamp_ms=record.timestamp_ms,
        )
        key = wire.write_key(ceil_ms(message.deliver_at), message.id)
        value = wire.write_envelope(message, now_ms=record.timestamp_ms)
        return Record(record.offset, record.timestamp_ms, key, value)

    def _obey(self, source: Source, record: Record, out: Outlet, now_ms: int, *, again: bool) -> None:
        """Recall a record that is not done, and say whether that was so."""
        try:
            command = Command.read(record.value or b"")
        except ValueError as error:
            out.bury(record, str(error))
            source.end(record.offset)
            return
        if (again or self._recall(command, out, now_ms)) and command.envelope:
            key = wire.write_key(command.deliver_at_ms, command.message_id)
            self._place(source, Record(record.offset, record.timestamp_ms, key, command.envelope), out, now_ms)
        else:
            source.end(record.offset)

    def _recall(self, command: Command, out: Outlet, now_ms: int) -> bool:
        place, target = command.place, self.sources.get(command.place.topic)
        waits = target is not None and target.is_waiting(place.offset)
        out.tell(self.number, write_answer(command.id, at_ms=now_ms, obeyed=waits))
        if target is None or not waits:
            return False
        told = b""
        if place.offset in target.progress.open:
            target.end(place.offset)
        else:
            target.recalled.add(place.offset)
            out.remember(place, recalled=True)
            if place.topic == self._inbox:
                # The journal has not told of it, and will not when it is passed over.
                told = command.envelope
        entry = write_entry(
            command.change,
            at_ms=now_ms,
            deliver_at_ms=command.deliver_at_ms,
            message_id=command.message_id.encode(),
            channel=command.channel,
            envelope=told,
        )
        out.tell(self.number, entry)
        return True

    def _fire(self, out: Outlet, now_ms: int, limit: int) -> int:
        held, fired = self._held, 0
        while held and held[0][0] <= now_ms and fired < limit:
            _, _, source, record = heappop(held)
            fired += 1
            # A record that is done by now was recalled.
            if record.offset in source.progress.open:
                self._deliver(record, out, now_ms)
                source.end(record.offset)
        return fired

    def _deliver(self, record: Record, out: Outlet, now_ms: int) -> None:
        try:
            envelope = wire.Envelope(record.key or b"", record.value or b"")
        except Exception as error:  # noqa: BLE001 - whatever it is, the messages behind it must not wait for it
            out.bury(record, str(error))
            return
        refusal = out.deliver(self.number, envelope, now_ms)
        if refusal is not None:
            out.bury(record, refusal)
        entry = write_entry(
            Change.DISPATCHED if refusal is None else Change.DEAD_LETTERED,
            at_ms=now_ms,
            deliver_at_ms=envelope.deliver_at_ms,
            message_id=envelope.message_id,
            channel=envelope.channel,
            reason=refusal,
        )
        out.tell(self.number, entry)


def _scheduled(envelope: wire.Envelope, value: bytes) -> bytes:
    """Return what the journal says of a message that begins to wait."""
    change = envelope.change or Change.SCHEDULED
    return write_entry(
        change,
        at_ms=envelope.scheduled_at_ms,
        deliver_at_ms=envelope.deliver_at_ms,
        message_id=envelope.message_id,
        channel=envelope.channel,
        reason=envelope.more.get("reason"),
        envelope=value,
    )
