"""One lane of the ladder: what to do with its records, and when; pure, no I/O.

A lane reads its records in the order of their topics' logs, gives out what follows from them, and knows at any moment
which records are done. Whoever runs it writes both in one transaction. After a crash the lane is built again from what
was committed last, so nothing is done twice or left out, whatever was in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.commands import Command, Place
from airflow_delay_provider.brokers.kafka.journal_wire import write_answer, write_entry
from airflow_delay_provider.brokers.kafka.progress import Progress, note_of
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
#: More messages do not wait for what is found out of their channels: they rest again, so that they fill no memory.
MANY_UNKNOWN = 10_000
#: What a header needs besides its name and value.
HEADER_BYTES = 10
#: What is left of a command that says nothing.
CUT_BYTES = 1_000
#: How long a message rests again whose channel cannot be written to for the time being.
UNAVAILABLE_MS = 10_000
#: A partition from which so many bytes were taken in has its next turn when they are committed: what is due a moment
#: later would wait until the broker has stored all of that, and so would what lies in other partitions.
TAKE_BYTES = 500_000
#: With so many bytes in a transaction nothing more is given out.
FIRE_BYTES = 4_000_000
#: How soon a channel is asked for again that is not known yet.
ASK_AGAIN_MS = 20


class Record(NamedTuple):
    """What is read of a Kafka record."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: wire.Headers | None = None

    @property
    def size(self) -> int:
        """How many bytes it has."""
        headers = self.headers or ()
        size = sum(len(name) + len(value or b"") + HEADER_BYTES for name, value in headers)
        return size + len(self.key or b"") + len(self.value or b"")


class Standing(Enum):
    """What is known of writing a message to its channel."""

    GOOD = auto()
    #: Not known yet; it is in a moment.
    UNKNOWN = auto()
    #: It cannot be written now, and may be later.
    UNAVAILABLE = auto()
    #: It cannot be written there.
    REFUSED = auto()


class Opinion(NamedTuple):
    """The standing of a message, and why."""

    standing: Standing
    reason: str = ""


GOOD = Opinion(Standing.GOOD)


class Outlet(Protocol):
    """Where everything goes that a lane gives out; in one transaction with its progress."""

    @property
    def size(self) -> int:
        """How many bytes are in the transaction."""
        ...

    def expect(self, channel: str) -> None:
        """Note that something is delivered to a channel soon."""
        ...

    def judge(self, place: Place, envelope: wire.Envelope) -> Opinion:
        """Say whether a message can be put into its channel, as far as that is known."""
        ...

    def rest(self, lane: int, hold_ms: int, key: bytes, value: bytes) -> None:
        """Put an envelope into a rung."""
        ...

    def deliver(self, place: Place, envelope: wire.Envelope, now_ms: int) -> None:
        """Put a message into its channel."""
        ...

    def bury(self, place: Place, record: Record, reason: str, *, most_bytes: int = ...) -> None:
        """Put a record that cannot be delivered into the topic of the dead, whatever it is; more bytes are cut."""
        ...

    def tell(self, lane: int, entry: bytes) -> None:
        """Write an entry into the journal."""
        ...

    def remember(self, place: Place, *, recalled: bool) -> None:
        """Remember that a record is to be passed over, or forget it."""
        ...


class Source:
    """One partition that a lane reads: fetched records whose turn has not come, and which ones are done."""

    __slots__ = (
        "_begun",
        "_committed",
        "_ended",
        "_recalled_before",
        "condemned",
        "hold_ms",
        "is_changed",
        "progress",
        "recalled",
        "topic",
        "topic_id",
        "waiting",
    )

    def __init__(self, topic: str, hold_ms: int, progress: Progress, *, topic_id: str = "") -> None:
        self.topic = topic
        #: Of a topic that is deleted and created again, the id is another one.
        self.topic_id = topic_id
        #: How long records rest here; 0 is not at all.
        self.hold_ms = hold_ms
        self.progress = progress
        self.waiting: deque[Record] = deque()
        #: Offsets of records that are passed over when their turn comes.
        self.recalled: set[int] = set()
        #: Offsets of records that could not be handled, why, and whether their content may be kept.
        self.condemned: dict[int, tuple[str, bool]] = {}
        #: Whether there is progress to be committed.
        self.is_changed = False
        #: What is needed to go back to the last commit: the records begun and not done by then, or begun since; those
        #: that ended since; and which offsets were recalled, or were not, before that changed.
        self._begun: dict[int, Record] = {}
        self._ended: list[int] = []
        self._recalled_before: dict[int, bool] = {}
        self._committed = (progress.low, progress.note())

    def place(self, lane: int, offset: int) -> Place:
        """Return the place of one of its records."""
        return Place(topic=self.topic, lane=lane, offset=offset)

    def begin(self, offset: int) -> bool:
        """Take the next record and return whether there is anything to do for it."""
        record = self.waiting.popleft()
        self.is_changed = True
        if not self.progress.begin(offset):
            return False
        self._begun[offset] = record
        return True

    def end(self, offset: int) -> None:
        """Note that a record is done."""
        self.progress.end(offset)
        self._ended.append(offset)
        self.is_changed = True

    def recall(self, offset: int, *, recalled: bool) -> None:
        """Note that a record is to be passed over, or was."""
        self._recalled_before.setdefault(offset, offset in self.recalled)
        if recalled:
            self.recalled.add(offset)
        else:
            self.recalled.discard(offset)

    def committed(self) -> None:
        """Note that everything up to now is committed."""
        if self.is_changed:
            self._committed = (self.progress.low, self.progress.note())
        for offset in self._ended:
            self._begun.pop(offset, None)
        self._ended.clear()
        self._recalled_before.clear()
        self.is_changed = False

    def roll_back(self) -> None:
        """Be again as after the last commit, with what was read since."""
        again = [self._begun[offset] for offset in sorted(self._begun)]
        self.waiting.extendleft(reversed(again))
        self.progress = Progress(*self._committed)
        for offset, was_recalled in self._recalled_before.items():
            (self.recalled.add if was_recalled else self.recalled.discard)(offset)
        self._begun.clear()
        self._ended.clear()
        self._recalled_before.clear()
        self.is_changed = False

    def is_waiting(self, offset: int) -> bool:
        """Whether a record is still to be given out."""
        return self.progress.is_waiting(offset) and offset not in self.recalled

    def has_room(self) -> bool:
        """Whether the next record may be begun before another one ends."""
        return bool(self.waiting) and self.progress.has_room_for(self.waiting[0].offset)

    def is_crowded(self) -> bool:
        """Whether records must end soon, or the partition could not be read on."""
        return self.progress.is_crowded()

    def turn_ms(self, record: Record) -> int:
        """Return when a record's turn comes: after its rest, as far as the broker's clock agrees with ours.

        Where that runs ahead, it comes before its message would be late. Where that runs behind, it comes when the next
        rest is a shorter one: what was put here had less than two such rests ahead, or it would be in a longer one.
        That cannot be said of the longest ones, in which messages rest several times.
        """
        if not self.hold_ms or record.key is None or record.offset in self.condemned:
            return 0
        rested_ms, latest_ms = record.timestamp_ms + self.hold_ms, wire.held_until_ms(record.key) - SLACK_MS
        if self.hold_ms <= COVER_MS // 2:
            rested_ms = max(rested_ms, latest_ms - self.hold_ms + 1)
        return min(rested_ms, latest_ms)

    def is_misplaced(self, record: Record, now_ms: int) -> bool:
        """Whether a record would hold up those behind it, because it was put here with two such rests ahead or more.

        This package does not do so: it would have put it into a longer one. The longest rests end by the broker's clock
        alone, and hold up nobody.
        """
        if not self.hold_ms or self.hold_ms > COVER_MS // 2 or record.key is None:
            return False
        return wire.held_until_ms(record.key) - SLACK_MS - now_ms >= 2 * self.hold_ms


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
        #: Those of them that are due, and whose channels are not known yet; and when they are looked at again.
        self._unknown: list[tuple[int, int, Source, Record]] = []
        #: Channels and keys of those, behind which others keep their order.
        self._unknown_keys: set[tuple[str, bytes]] = set()
        self._ask_again_ms = 0
        self._in_hand: Place | None = None

    @property
    def in_hand(self) -> Place | None:
        """The record that was worked on last."""
        return self._in_hand

    def take(self, out: Outlet, now_ms: int, *, limit: int) -> int:
        """Take in records whose turn has come, ``limit`` at most, and return how many."""
        steps = 0
        for source in self.sources.values():
            most = out.size + TAKE_BYTES
            while source.waiting and steps < limit and out.size < most and self._may_take(source, now_ms):
                steps += 1
                self._take(source, out, now_ms)
        return steps

    def fire(self, out: Outlet, now_ms: int, *, limit: int) -> int:
        """Give out messages that are due, ``limit`` at most, and return how many."""
        held, fired, asked_again = self._held, 0, len(self._unknown)
        if self._unknown and now_ms >= self._ask_again_ms:
            for due in self._unknown:
                heappush(held, due)
            self._unknown.clear()
            self._unknown_keys.clear()
        while held and held[0][0] <= now_ms and fired < limit and out.size < FIRE_BYTES:
            due = heappop(held)
            _, _, source, record = due
            # A record that is done by now was recalled.
            if record.offset not in source.progress.open:
                continue
            self._in_hand = source.place(self.number, record.offset)
            if not self._deliver(source, record, out, now_ms):
                if not self._unknown:
                    # The more there were, the longer it takes to look at all of them.
                    self._ask_again_ms = now_ms + max(ASK_AGAIN_MS, asked_again // 4)
                self._unknown.append(due)
            else:
                fired += 1
                source.end(record.offset)
        return fired

    def next_turn_ms(self) -> int | None:
        """Return when there is something to do next, as far as known; None is nothing."""
        turns = [self._held[0][0]] if self._held else []
        if self._unknown:
            turns.append(self._ask_again_ms)
        if self._has_room():
            reading = [each for each in self.sources.values() if each.waiting]
            turns += [each.turn_ms(each.waiting[0]) for each in reading if each.has_room()]
        return min(turns, default=None)

    def progress(self) -> Iterator[tuple[str, int, str]]:
        """Return the topic, offset and note of each source that has something to commit."""
        for source in self.sources.values():
            if source.is_changed:
                yield source.topic, source.progress.low, note_of(source.progress, source.topic_id)

    def committed(self) -> None:
        """Note that everything up to now is committed."""
        for source in self.sources.values():
            source.committed()

    def roll_back(self) -> None:
        """Be again as after the last commit; as a lane that is built again from that, without reading it again."""
        self._held.clear()
        self._unknown.clear()
        self._unknown_keys.clear()
        for source in self.sources.values():
            source.roll_back()

    # -- steps ---------------------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        return len(self._held) + len(self._unknown) < MAX_HELD

    def _may_take(self, source: Source, now_ms: int) -> bool:
        if not source.has_room() or not self._has_room():
            return False
        record = source.waiting[0]
        return source.turn_ms(record) <= now_ms or source.is_misplaced(record, now_ms)

    def _take(self, source: Source, out: Outlet, now_ms: int) -> None:
        record = source.waiting[0]
        place = self._in_hand = source.place(self.number, record.offset)
        # Begun before a crash: what had to be said of it was said then, only its message is still to be given out.
        again = record.offset < source.progress.next
        if not source.begin(record.offset):
            return
        if record.offset in source.recalled:
            source.recall(record.offset, recalled=False)
            out.remember(place, recalled=False)
            source.end(record.offset)
        elif record.offset in source.condemned:
            self._give_up(source, record, out, now_ms, again=again)
        elif source.topic == self._control:
            self._obey(source, record, out, now_ms, again=again)
        elif source.topic == self._inbox:
            self._accept(source, record, out, now_ms, again=again)
        else:
            self._place(source, record, out, now_ms)

    def _place(self, source: Source, record: Record, out: Outlet, now_ms: int) -> None:
        """Send an envelope to its next rest, or hold it here for its last moments."""
        key, value = record.key, record.value
        wrong = _no_envelope(record, source.topic)
        if wrong is not None or key is None or value is None:
            out.bury(source.place(self.number, record.offset), record, wrong or "")
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
            if channel := wire.channel_of(value):
                out.expect(channel)

    def _accept(self, source: Source, record: Record, out: Outlet, now_ms: int, *, again: bool) -> None:
        """Take in what was scheduled: an envelope of ours, or a plain record with headers."""
        try:
            accepted = self._read_request(record, f"{source.topic}-{self.number}-{record.offset}")
            envelope = wire.Envelope(accepted.key or b"", accepted.value or b"")
            envelope.check()
            entry = _scheduled(envelope, accepted.value or b"")
        except Exception as error:  # noqa: BLE001 - anybody may write to the inbox, and nobody may stop it by that
            out.bury(source.place(self.number, record.offset), record, _sentence(error))
            source.end(record.offset)
            return
        if not again:
            out.tell(self.number, entry)
        self._place(source, accepted, out, now_ms)

    def _read_request(self, record: Record, position: str) -> Record:
        """Return the envelope that a record in the inbox is or asks for."""
        if record.size > MAX_VALUE_BYTES:
            raise InvalidMessageError(
                "payload", f"{record.size} bytes are too many for the ladder", f"send {MAX_VALUE_BYTES} at most"
            )
        if record.headers:
            return self._enveloped(record, position)
        if record.key is None or len(record.key) < 9 or record.value is None:
            raise InvalidMessageError("headers", "are missing", f"name at least {wire.CHANNEL} and {wire.DELIVER_AT}")
        return record

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
            # Nobody replays it, and what it is about was not recalled: its beginning is enough.
            out.bury(source.place(self.number, record.offset), record, _sentence(error), most_bytes=CUT_BYTES)
            source.end(record.offset)
            return
        if (again or self._recall(command, out, now_ms)) and command.envelope:
            key = wire.write_key(command.deliver_at_ms, command.message_id)
            self._place(source, Record(record.offset, record.timestamp_ms, key, command.envelope), out, now_ms)
        else:
            source.end(record.offset)

    def _recall(self, command: Command, out: Outlet, now_ms: int) -> bool:
        place, target = command.place, self.sources.get(command.place.topic)
        waits = target is not None and place.lane == self.number and target.is_waiting(place.offset)
        out.tell(self.number, write_answer(command.id, at_ms=now_ms, obeyed=waits))
        if target is None or not waits:
            return False
        told = b""
        if place.offset in target.progress.open:
            target.end(place.offset)
        else:
            target.recall(place.offset, recalled=True)
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

    def _deliver(self, source: Source, record: Record, out: Outlet, now_ms: int) -> bool:
        """Give out a message and return whether that is done; it is not while nothing is known of its channel."""
        place, key, value = source.place(self.number, record.offset), record.key or b"", record.value or b""
        try:
            envelope = wire.Envelope(key, value)
            envelope.check()
        except Exception as error:  # noqa: BLE001 - whatever it is, the messages behind it must not wait for it
            out.bury(place, record, _sentence(error))
            return True
        standing, reason = out.judge(place, envelope)
        order = None if envelope.key is None else (envelope.channel, envelope.key)
        if standing is Standing.UNKNOWN and (len(self._unknown) >= MANY_UNKNOWN or source.is_crowded()):
            standing = Standing.UNAVAILABLE
        elif standing is Standing.UNKNOWN or order in self._unknown_keys:
            if order is not None:
                self._unknown_keys.add(order)
            return False
        if standing is Standing.UNAVAILABLE:
            until_ms = now_ms + UNAVAILABLE_MS
            hold_ms = self._ladder.next_hold(UNAVAILABLE_MS - SLACK_MS) or self._ladder.tick_ms
            out.rest(self.number, hold_ms, wire.write_key(until_ms, wire.message_id_of(key)), value)
            return True
        if standing is Standing.REFUSED:
            out.bury(place, record, reason)
            out.tell(self.number, _ended(envelope, now_ms, reason))
        else:
            out.deliver(place, envelope, now_ms)
            out.tell(self.number, _ended(envelope, now_ms, None))
        return True

    def _give_up(self, source: Source, record: Record, out: Outlet, now_ms: int, *, again: bool) -> None:
        """Bury a record that could not be handled, and tell the journal of it where it is a message."""
        reason, has_content = source.condemned[record.offset]
        buried = record if has_content else Record(record.offset, record.timestamp_ms, None, None)
        out.bury(source.place(self.number, record.offset), buried, reason)
        source.end(record.offset)
        try:
            if source.topic == self._inbox and record.headers:
                record = self._enveloped(record, f"{source.topic}-{self.number}-{record.offset}")
            envelope = wire.Envelope(record.key or b"", record.value or b"")
            envelope.check()
        except Exception:  # noqa: BLE001 - it is none
            return
        if source.topic == self._inbox and not again:
            out.tell(self.number, _scheduled(envelope, record.value or b""))
        out.tell(self.number, _ended(envelope, now_ms, reason))


def _no_envelope(record: Record, topic: str) -> str | None:
    """Say why a record cannot rest in the ladder."""
    key, value = record.key, record.value
    if key is None or value is None or len(key) < 9:
        return f"what lies in {topic} at {record.offset} is no message of this ladder"
    if len(key) + len(value) > MAX_VALUE_BYTES:
        return f"payload: {len(key) + len(value)} bytes are too many for the ladder; send {MAX_VALUE_BYTES} at most"
    if wire.held_until_ms(key) > wire.MAX_MS:
        return f"deliver_at: {wire.held_until_ms(key)} is in no calendar; use milliseconds since 1970"
    return None


def _sentence(error: Exception) -> str:
    """Return what a person is told; a defect has no text of its own at times."""
    return str(error) or type(error).__name__


def _ended(envelope: wire.Envelope, now_ms: int, refusal: str | None) -> bytes:
    """Return what the journal says of a message that has left the ladder."""
    return write_entry(
        Change.DISPATCHED if refusal is None else Change.DEAD_LETTERED,
        at_ms=now_ms,
        deliver_at_ms=envelope.deliver_at_ms,
        message_id=envelope.message_id,
        channel=envelope.channel,
        reason=refusal,
    )


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
