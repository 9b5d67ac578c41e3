"""Random lives of a partition under a simulated clock: schedules, recalls, crashes, rebalances, zombies, outages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from airflow_delay_provider.brokers.kafka import header_protocol as protocol
from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.dispatch.channel_status import ChannelCheck, ChannelStatus
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import Record
from airflow_delay_provider.brokers.kafka.recall import Command, RecordPosition
from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message
from tests.unit.brokers.kafka.model import MISSING, Dispatcher, SimulatedKafka

START_MS = 1_900_000_000_000
DAY_MS = 86_400_000
#: From the past to a week.
LONGEST_DELAYS_MS = (0, 3, 600, 2_600, 10_000, 300_000, 3_600_000, DAY_MS, 7 * DAY_MS)
TOPOLOGIES = (Topology(), Topology(), Topology(name="side", radix=2), Topology(radix=7))
#: More turns than this at the end are a partition that runs in circles.
MANY_TURNS = 5_000


@dataclass(frozen=True, slots=True)
class Sent:
    """A message that a user gave."""

    message_id: str
    channel: str
    payload: bytes
    sent_ms: int
    due_ms: int


class RandomRun:
    """One life, decided by ``random`` alone; :meth:`play` it, then :meth:`finish` it."""

    def __init__(self, random: Random, *, skew_ms: int = 0) -> None:
        self.random = random
        self.now_ms = START_MS
        #: By how much the broker's clock runs ahead of the dispatchers'.
        self.skew_ms = skew_ms
        self.kafka = SimulatedKafka(random.choice(TOPOLOGIES), partition=random.randrange(4))
        self.sent: list[Sent] = []
        self.commands: list[Command] = []
        self.written_ms: dict[str, int] = {}
        #: What was put into the inbox and asks for nothing that can be done.
        self.bad: list[Record] = []
        #: Refused although the message was still there.
        self.lies: list[Command] = []
        self.is_finished = False
        self.dispatcher = self._start()
        self.zombies: list[Dispatcher] = []
        self._found: list[tuple[RecordPosition, str, bytes]] = []
        self._pass(0)

    def play(self, steps: int) -> None:
        """Do so many random things."""
        for _ in range(steps):
            self.random.choice(EVENTS)(self)

    def finish(self) -> bool:
        """Let all time pass with a dispatcher that works, and return whether nothing is left to do."""
        self.kafka.checks.clear()
        for _ in range(MANY_TURNS):
            self.dispatcher.fetch_all()
            while self.dispatcher.advance(self.now_ms):
                pass
            self.commit()
            self.dispatcher.fetch_all()
            ready_ms = self.dispatcher.partition.next_ready_ms()
            if ready_ms is None:
                self.is_finished = True
                return True
            self._pass(max(0, ready_ms - self.now_ms))
        return False

    # -- users ---------------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Schedule as ``KafkaBroker`` does."""
        due_ms = self.now_ms + self._delay()
        message = self._message(due_ms)
        key = wire.encode_key(due_ms, message.id)
        self._write_inbox(key, wire.encode_envelope(message, now_ms=self.now_ms))
        self.sent.append(Sent(message.id, message.channel, message.payload, self.now_ms, due_ms))

    def schedule_plainly(self) -> None:
        """Schedule like a plain producer."""
        random, message = self.random, self._message(0)
        headers = [(protocol.CHANNEL, message.channel.encode())]
        delay_ms, stamp_ms = self._delay(), self.kafka.now_ms
        if random.random() < 0.5:
            due_ms = stamp_ms + delay_ms
            headers.append((protocol.DELIVER_AFTER_MS, b"%d" % delay_ms))
        else:
            due_ms = self.now_ms + delay_ms
            text = from_ms(due_ms).isoformat() if random.random() < 0.5 else str(due_ms)
            headers.append((protocol.DELIVER_AT, text.encode()))
        has_id = random.random() < 0.5
        if has_id:
            headers.append((protocol.ID, message.id.encode()))
        offset = self._write_inbox(b"some key", message.payload, headers)
        message_id = message.id if has_id else f"{self.kafka.topology.inbox}-{self.kafka.partition}-{offset}"
        self.sent.append(Sent(message_id, message.channel, message.payload, self.now_ms, due_ms))

    def write_nonsense(self) -> None:
        """Write a record that cannot be delivered."""
        token = b"nonsense %d" % len(self.bad)
        key, value, headers = self.random.choice(
            [
                (None, token, None),
                (token, None, None),
                (token, token, None),
                (token, token, [(protocol.DELIVER_AT, b"0")]),
                (token, token, [(protocol.CHANNEL, b"orders"), (protocol.DELIVER_AT, b"tomorrow")]),
                (token, b"\x09" + bytes(60) + token, None),
            ]
        )
        self._write_inbox(key, value, headers)
        self.bad.append(Record(0, 0, key, value))

    def find(self) -> None:
        """Look for waiting messages; the commands follow now or when they have moved on."""
        topology = self.kafka.topology
        for topic, record in self.kafka.waiting():
            if self.random.random() < 0.5:
                continue
            message_id, value = _look_at(topology, topic, self.kafka.partition, record)
            if value:
                position = RecordPosition(topic=topic, partition=self.kafka.partition, offset=record.offset)
                self._found.append((position, message_id, value))

    def command(self) -> None:
        """Recall some of the found messages."""
        random, found = self.random, self._found
        while found and random.random() < 0.7:
            position, message_id, value = found.pop(random.randrange(len(found)))
            envelope = wire.Envelope(wire.encode_key(0, message_id), value)
            change = random.choice((Change.CANCELLED, Change.RESCHEDULED, Change.EXPEDITED))
            delay_ms = self.random.choice((self._delay(), 1_500)) if change is Change.RESCHEDULED else 0
            due_ms = envelope.deliver_at_ms if change is Change.CANCELLED else self.now_ms + delay_ms
            command = Command(
                id=f"command-{len(self.commands)}",
                change=change,
                message_id=message_id,
                channel=envelope.channel,
                position=position,
                deliver_at_ms=due_ms,
                envelope=b"" if change is Change.CANCELLED else wire.with_deliver_at(value, due_ms),
            )
            log = self.kafka.logs[self.kafka.topology.control]
            log.append(self.kafka.now_ms, message_id.encode(), command.encode())
            self.commands.append(command)
            self.written_ms[command.id] = self.now_ms

    def recall(self) -> None:
        """Find and command at once."""
        self.find()
        self.command()

    # -- dispatchers ---------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Read some more of some topics."""
        for topic in self.kafka.logs:
            if self.random.random() < 0.6:
                self.dispatcher.fetch(topic, self.random.randrange(1, 5))

    def advance(self) -> None:
        self.dispatcher.advance(self.now_ms, limit=self.random.choice((1, 3, 2000)))

    def commit(self) -> None:
        before = len(self.kafka.journal)
        if not self.dispatcher.commit():
            self.dispatcher = self._start()
            return
        refused = {
            result.command_id
            for encoded in self.kafka.journal[before:]
            if (result := encoded.result) is not None and not result.accepted
        }
        self.lies += [each for each in self.commands if each.id in refused and self._is_there(each.position)]

    def work(self) -> None:
        """Do what a dispatcher that keeps up does."""
        self.dispatcher.fetch_all()
        self.dispatcher.advance(self.now_ms)
        self.commit()

    def crash(self) -> None:
        """Lose everything in memory; another dispatcher begins with the committed progress."""
        self.dispatcher.crash()
        self.dispatcher = self._start()

    def roll_back(self) -> None:
        """Abort a transaction that a bad channel has spoiled."""
        self.dispatcher.roll_back()

    def forget_channel(self) -> None:
        """Let nothing be known of a channel for a while."""
        if self.random.random() < 0.5:
            self.kafka.checks["orders"] = ChannelCheck(ChannelStatus.UNKNOWN)
        else:
            self.kafka.checks.clear()

    def rebalance(self) -> None:
        """Give the partition to another one, after a last commit."""
        self.commit()
        self.dispatcher = self._start()

    def lose(self) -> None:
        """Give the partition to another one while the first does not know it."""
        self.zombies.append(self.dispatcher)
        self.dispatcher = self._start()

    def haunt(self) -> None:
        """Let members that lost the partition continue until a commit is refused."""
        for zombie in self.zombies:
            zombie.fetch_all()
            zombie.advance(self.now_ms)
        if self.random.random() < 0.5:
            self.zombies = [each for each in self.zombies if each.commit()]

    def trim(self) -> None:
        """Remove what messages have left."""
        self.kafka.trim()

    # -- time ----------------------------------------------------------------------------------------------------

    def wait_a_little(self) -> None:
        self._pass(self.random.choice((1, 30, 400, 2_500)))

    def wait_for_a_turn(self) -> None:
        """Wait until there is something to do, as far as the dispatcher knows."""
        ready_ms = self.dispatcher.partition.next_ready_ms()
        if ready_ms is not None:
            self._pass(max(0, ready_ms - self.now_ms + self.random.choice((0, 0, 1, 100))))

    def suffer_an_outage(self) -> None:
        """Let a long time pass in which no dispatcher works."""
        self._pass(self.random.randrange(self.random.choice((60_000, DAY_MS))))

    # -- pieces --------------------------------------------------------------------------------------------------

    def _start(self) -> Dispatcher:
        return Dispatcher(self.kafka)

    def _pass(self, milliseconds: int) -> None:
        self.now_ms += milliseconds
        self.kafka.now_ms = self.now_ms + self.skew_ms

    def _delay(self) -> int:
        return self.random.randint(-1, self.random.choice(LONGEST_DELAYS_MS))

    def _message(self, due_ms: int) -> Message:
        number = len(self.sent)
        return Message(
            id=f"message-{number}",
            channel=MISSING if self.random.random() < 0.05 else "orders",
            payload=b"payload %d" % number,
            deliver_at=from_ms(due_ms),
        )

    def _write_inbox(self, key: bytes | None, value: bytes | None, headers: protocol.Headers | None = None) -> int:
        log = self.kafka.logs[self.kafka.topology.inbox]
        log.skip(self.random.choice((0, 0, 0, 1, 7)))
        return log.append(self.kafka.now_ms, key, value, headers)

    def _is_there(self, position: RecordPosition) -> bool:
        return self.kafka.progress(position.topic).is_waiting(position.offset) and position not in self.kafka.recalled


def _look_at(topology: Topology, topic: str, partition: int, record: Record) -> tuple[str, bytes]:
    """Return the message that waits in a record, as ``Recaller`` does; no bytes where there is none."""
    key, value = record.key or b"", record.value or b""
    if topic == topology.control:
        command = Command.decode(value)
        return command.message_id, command.envelope
    if record.headers:
        position = f"{topic}-{partition}-{record.offset}"
        try:
            message = protocol.decode_request(
                default_id=position, key=key, value=value, headers=record.headers, timestamp_ms=record.timestamp_ms
            )
        except ValueError:
            return "", b""
        return message.id, wire.encode_envelope(message, now_ms=record.timestamp_ms)
    return key[8:].decode(), value if key[8:].startswith(b"message-") else b""


Event = Callable[[RandomRun], None]
_WEIGHTS: dict[Event, int] = {
    RandomRun.schedule: 14,
    RandomRun.schedule_plainly: 5,
    RandomRun.write_nonsense: 2,
    RandomRun.find: 3,
    RandomRun.command: 6,
    RandomRun.recall: 4,
    RandomRun.fetch: 12,
    RandomRun.advance: 12,
    RandomRun.commit: 8,
    RandomRun.work: 6,
    RandomRun.crash: 3,
    RandomRun.roll_back: 4,
    RandomRun.forget_channel: 3,
    RandomRun.rebalance: 2,
    RandomRun.lose: 2,
    RandomRun.haunt: 3,
    RandomRun.trim: 2,
    RandomRun.wait_a_little: 8,
    RandomRun.wait_for_a_turn: 8,
    RandomRun.suffer_an_outage: 1,
}
EVENTS = [event for event, weight in _WEIGHTS.items() for _ in range(weight)]
