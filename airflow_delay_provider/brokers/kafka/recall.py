"""Recalling waiting messages: cancel, reschedule, expedite.

A command names the record that a message waits in. The dispatcher of that partition accepts it if the record is not
done by then, and refuses it otherwise, in the transaction that contains its answer: a message is never both recalled
and dispatched. A rescheduled message continues from the command itself, which contains it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any
from uuid import uuid4

from confluent_kafka import Message as KafkaMessage
from confluent_kafka import TopicPartition

from airflow_delay_provider.brokers.kafka import admin, wire
from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.header_protocol import MAX_MS, MAX_REASON_LENGTH, MIN_MS
from airflow_delay_provider.brokers.kafka.journal import JournalReader
from airflow_delay_provider.brokers.kafka.progress import Progress, progress_of
from airflow_delay_provider.brokers.kafka.publish import OutgoingRecord, publish
from airflow_delay_provider.brokers.kafka.reader import PartitionId, Reader, log_ends, log_starts, stable_ends
from airflow_delay_provider.domain.exceptions import BrokerError, LifecycleError, UnknownMessageError
from airflow_delay_provider.domain.lifecycle import Change, JournalEntry, outcome_of
from airflow_delay_provider.domain.message import require_channel, require_message_id

#: How far back the journal is read to find out why a message does not wait any more.
LOOK_BACK_RECORDS = 200_000
_LENGTH = Struct(">I")
_RECALLS = {Change.CANCELLED, Change.RESCHEDULED, Change.EXPEDITED}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordPosition:
    """Topic, partition and offset of a record."""

    topic: str
    partition: int
    offset: int

    def key(self) -> bytes:
        """Return its key in the topic of recalls."""
        return f"{self.topic}:{self.offset}".encode()

    @classmethod
    def from_key(cls, key: bytes, partition: int) -> RecordPosition:
        """Undo :meth:`key`."""
        topic, _, offset = key.decode().rpartition(":")
        return cls(topic=topic, partition=partition, offset=int(offset))


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command to recall one record."""

    id: str
    change: Change
    message_id: str
    channel: str
    position: RecordPosition
    #: The new due time; of a cancelled message the old one.
    deliver_at_ms: int
    #: The message with its new due time; empty if it is cancelled.
    envelope: bytes = b""
    #: Until when the record is held, and a number that messages of one channel and key share: where a dispatcher on
    #: Spark finds the message. Commands of earlier versions have neither.
    held_until_ms: int | None = None
    order: int | None = None

    def encode(self) -> bytes:
        """Return the value of its record."""
        head = json.dumps(
            {
                "id": self.id,
                "change": self.change.value,
                "message_id": self.message_id,
                "channel": self.channel,
                "topic": self.position.topic,
                "lane": self.position.partition,
                "offset": self.position.offset,
                "deliver_at_ms": self.deliver_at_ms,
                "held_until_ms": self.held_until_ms,
                "order": self.order,
            }
        ).encode()
        return _LENGTH.pack(len(head)) + head + self.envelope

    @classmethod
    def decode(cls, value: bytes) -> Command:
        """Undo :meth:`encode`; raises ``ValueError`` for anything else."""
        try:
            (length,) = _LENGTH.unpack_from(value)
            start = _LENGTH.size
            head = json.loads(value[start : start + length])
            change = Change(head["change"])
            if change not in _RECALLS:
                raise ValueError(f"{change.value} is not a command")
            deliver_at_ms = int(head["deliver_at_ms"])
            if not MIN_MS <= deliver_at_ms <= MAX_MS:
                raise ValueError(f"{deliver_at_ms} is out of range")
            position = RecordPosition(topic=str(head["topic"]), partition=int(head["lane"]), offset=int(head["offset"]))
            return cls(
                id=require_message_id(head["id"]),
                change=change,
                message_id=require_message_id(head["message_id"]),
                channel=require_channel(head["channel"]),
                position=position,
                deliver_at_ms=deliver_at_ms,
                envelope=value[start + length :],
                held_until_ms=_read_optional(head.get("held_until_ms")),
                order=_read_optional(head.get("order")),
            )
        except Exception as error:
            raise ValueError(f"not a command: {str(error)[:MAX_REASON_LENGTH]}") from error


@dataclass(frozen=True, slots=True)
class WaitingRecord:
    """A record in which a message waits."""

    position: RecordPosition
    message_id: str
    value: bytes
    held_until_ms: int


class Recaller:
    """Finds messages by reading all waiting records, so no index has to be kept."""

    def __init__(self, clients: KafkaClients, journal: JournalReader) -> None:
        self._clients = clients
        self._topology = clients.config.topology
        #: Topics whose records are not in a rung yet.
        self._incoming = (self._topology.inbox, self._topology.control)
        self._journal = journal
        self._reader = Reader(clients, group=self._topology.dispatch_group)

    def recall(self, message_ids: Sequence[str], change: Change, deliver_at_ms: int | None) -> None:
        """Change all of these messages; an id that is not waiting is refused before any message is changed.

        A message may move to another record before its command is read. The command is refused then, and the message
        is searched again. If it is dispatched meanwhile, the error names it; other messages may be changed already.
        """
        missing, known_gone = dict.fromkeys(message_ids), set[RecordPosition]()
        seen: set[str] = set()
        deadline = time.monotonic() + self._clients.config.confirm_seconds
        while missing:
            found = [each for each in self._find(set(missing)) if each.position not in known_gone]
            seen |= {each.message_id for each in found}
            for message_id, entry in self._ended([each for each in missing if not _is_in(each, found)], seen).items():
                self._require(message_id, entry, change)
                del missing[message_id]
            if found:
                accepted, gone = self._command(found, change, deliver_at_ms)
                known_gone |= gone
                for message_id in accepted:
                    missing.pop(message_id, None)
            if missing and time.monotonic() > deadline:
                raise BrokerError(
                    f"{self._clients.config.name}: message {next(iter(missing))!r} keeps moving; try again"
                )

    def find_any(self) -> str | None:
        """Return a topic with waiting messages, None if there is none."""
        # All existing partitions of existing topics, whatever the connection says.
        there = admin.partition_counts(self._clients)
        names = [each for each in there if each in self._incoming or self._topology.hold_of(each) is not None]
        if not names:
            return None
        progress = self._progress([(name, partition) for name in names for partition in range(there[name])])
        ends = stable_ends(self._clients, [TopicPartition(topic, partition) for topic, partition in progress])
        starts = {each: known.low for each, known in progress.items()}
        for record in self._reader.read_between(starts, ends):
            if progress[record.topic(), record.partition()].is_waiting(record.offset()):
                return str(record.topic())
        return None

    # -- finding -------------------------------------------------------------------------------------------------

    def _find(self, message_ids: set[str]) -> Iterator[WaitingRecord]:
        """Read every record that is not done.

        Progress is read first and the ends of logs last, so a message that moves meanwhile is found at least once.
        """
        topics = [*self._incoming, *admin.rungs(self._clients, self._topology)]
        progress = self._progress(
            [(topic, partition) for topic in topics for partition in range(self._topology.partitions)]
        )
        ends = log_ends(self._clients, [TopicPartition(topic, partition) for topic, partition in progress])
        starts = {each: known.low for each, known in progress.items()}
        wanted = {each.encode() for each in message_ids}
        for record in self._reader.read_between(starts, ends):
            where = (record.topic(), record.partition())
            if progress[where].is_waiting(record.offset()):
                yield from self._match(record, wanted)

    def _match(self, record: KafkaMessage, wanted: set[bytes]) -> Iterator[WaitingRecord]:
        topic, key, value = record.topic(), record.key(), record.value() or b""
        if topic == self._topology.control:
            try:
                command = Command.decode(value)
            except ValueError:
                return
            message_id, value = command.message_id.encode(), command.envelope
            key = wire.encode_key(command.deliver_at_ms, command.message_id)
        elif topic == self._topology.inbox and record.headers():
            try:
                key, value = wire.encode_request(
                    default_id=f"{topic}-{record.partition()}-{record.offset()}",
                    key=key,
                    value=value,
                    headers=record.headers(),
                    timestamp_ms=record.timestamp()[1],
                )
            except ValueError:
                return
            message_id = key[8:]
        else:
            message_id = (key or b"")[8:]
        if message_id in wanted and value:
            position = RecordPosition(topic=topic, partition=record.partition(), offset=record.offset())
            yield WaitingRecord(position, message_id.decode(), value, wire.held_until_ms(key or b""))

    def _progress(self, partitions: Sequence[PartitionId]) -> dict[PartitionId, Progress]:
        committed = self._reader.committed(partitions, seconds=self._clients.config.confirm_seconds)
        starts = log_starts(self._clients, [each for each in committed if each.offset < 0])
        return {(each.topic, each.partition): progress_of(each, starts) for each in committed}

    # -- commanding ----------------------------------------------------------------------------------------------

    def _command(
        self, found: Sequence[WaitingRecord], change: Change, deliver_at_ms: int | None
    ) -> tuple[set[str], set[RecordPosition]]:
        """Return the ids of changed messages, and the positions of records that are done."""
        control, since = self._topology.control, self._journal.end()
        commands = {(command := _command_of(each, change, deliver_at_ms)).id: command for each in found}
        publish(
            self._clients,
            [
                OutgoingRecord(
                    each.message_id, control, each.encode(), each.message_id.encode(), each.position.partition
                )
                for each in commands.values()
            ],
        )
        results = self._journal.command_results(since, commands, seconds=self._clients.config.confirm_seconds)
        if len(results) < len(commands):
            silent = next(each for each in commands.values() if each.id not in results)
            raise BrokerError(
                f"{self._clients.config.name}: no dispatcher has answered whether message {silent.message_id!r} is"
                f" {change.value} within {self._clients.config.confirm_seconds:g} s; the command is kept and executed"
                " later: run `airflow delay dispatcher --kafka CONN`, then `airflow delay show` the message",
                unconfirmed=[each.message_id for each in commands.values() if each.id not in results],
            )
        accepted, gone = set[str](), set[RecordPosition]()
        for command_id, is_accepted in results.items():
            command = commands[command_id]
            gone.add(command.position)
            if is_accepted:
                accepted.add(command.message_id)
        return accepted, gone

    # -- refusing ------------------------------------------------------------------------------------------------

    def _ended(self, message_ids: Sequence[str], seen: set[str]) -> dict[str, JournalEntry]:
        """Return the outcomes of messages that are not waiting; refuse unknown ids."""
        if not message_ids:
            return {}
        outcomes = self._journal.find(dict.fromkeys(message_ids, self._journal.recently(LOOK_BACK_RECORDS)))
        for each in message_ids:
            # One that was found before has just left; its journal entry follows in a moment.
            if each not in outcomes and each not in seen:
                raise UnknownMessageError(each)
        return outcomes

    def _require(self, message_id: str, entry: JournalEntry, change: Change) -> None:
        if entry.change is Change.CANCELLED and change is Change.CANCELLED:
            return
        raise LifecycleError(
            message_id,
            f"is {outcome_of(entry.change).name} since {entry.at.isoformat()} and cannot be {change.value} any more;"
            " only a scheduled message can",
        )


def read_recalls(clients: KafkaClients, reader: Reader, numbers: Iterable[int]) -> dict[int, set[RecordPosition]]:
    """Return the positions of records to skip, by partition."""
    found = {number: set[RecordPosition]() for number in numbers}
    partitions = [TopicPartition(clients.config.topology.recalls, number) for number in found]
    ends, starts = log_ends(clients, partitions), log_starts(clients, partitions)
    for record in reader.read_between(starts, ends):
        number, key = record.partition(), record.key()
        if key is not None and (position := _position_of(key, number)) is not None:
            change = found[number].discard if record.value() is None else found[number].add
            change(position)
    return found


def _position_of(key: bytes, partition: int) -> RecordPosition | None:
    try:
        return RecordPosition.from_key(key, partition)
    except ValueError:
        # Another program wrote it.
        return None


def _is_in(message_id: str, found: Sequence[WaitingRecord]) -> bool:
    return any(each.message_id == message_id for each in found)


def _command_of(found: WaitingRecord, change: Change, deliver_at_ms: int | None) -> Command:
    envelope = wire.Envelope(wire.encode_key(0, found.message_id), found.value)
    return Command(
        id=str(uuid4()),
        change=change,
        message_id=found.message_id,
        channel=envelope.channel,
        position=found.position,
        deliver_at_ms=envelope.deliver_at_ms if deliver_at_ms is None else deliver_at_ms,
        envelope=b"" if deliver_at_ms is None else wire.with_deliver_at(found.value, deliver_at_ms),
        held_until_ms=found.held_until_ms,
        order=wire.order_of(envelope),
    )


def _read_optional(number: Any) -> int | None:
    return None if number is None else int(number)
