"""Calling back messages that wait: find their records, command the dispatchers, hear their answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from confluent_kafka import Message as KafkaMessage
from confluent_kafka import TopicPartition

from airflow_delay_provider.brokers.kafka import administering, wire
from airflow_delay_provider.brokers.kafka.commands import Command, Place
from airflow_delay_provider.brokers.kafka.progress import Progress, progress_of
from airflow_delay_provider.brokers.kafka.publishing import Outgoing, publish
from airflow_delay_provider.brokers.kafka.reading import Partition, Reader
from airflow_delay_provider.domain.journal import JournalEntry
from airflow_delay_provider.domain.lifecycle import Change, outcome_of
from airflow_delay_provider.exceptions import BrokerError, LifecycleError, UnknownMessageError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.kafka.journal import JournalReader
    from airflow_delay_provider.brokers.kafka.link import Link

#: How far back the journal is read to say why a message waits no longer.
LOOK_BACK_RECORDS = 200_000


@dataclass(frozen=True, slots=True)
class Found:
    """A record in which a message waits."""

    place: Place
    message_id: str
    value: bytes


class Recaller:
    """Finds messages by reading everything that waits, so that nobody has to keep an index of it."""

    def __init__(self, link: Link, journal: JournalReader) -> None:
        self._link = link
        self._topology = link.config.topology
        #: Where messages and commands come in.
        self._entries = (self._topology.inbox, self._topology.control)
        self._journal = journal
        self._reader = Reader(link, group=self._topology.dispatch_group)

    def recall(self, message_ids: Sequence[str], change: Change, deliver_at_ms: int | None) -> None:
        """Change all of these messages; an id that waits nowhere is refused before any is changed.

        A message may move on between the look and the command, which is then refused: it is looked for again. One that
        is dispatched in that moment is named, when others of the call are changed already.
        """
        missing, known_gone = dict.fromkeys(message_ids), set[Place]()
        seen: set[str] = set()
        deadline = time.monotonic() + self._link.config.confirm_seconds
        while missing:
            found = [each for each in self._find(set(missing)) if each.place not in known_gone]
            seen |= {each.message_id for each in found}
            for message_id, entry in self._ended([each for each in missing if not _is_in(each, found)], seen).items():
                self._require(message_id, entry, change)
                del missing[message_id]
            if found:
                obeyed, gone = self._command(found, change, deliver_at_ms)
                known_gone |= gone
                for message_id in obeyed:
                    missing.pop(message_id, None)
            if missing and time.monotonic() > deadline:
                raise BrokerError(f"{self._link.config.name}: message {next(iter(missing))!r} keeps moving; try again")

    def find_any(self) -> str | None:
        """Return a topic in which something waits, None where nothing does."""
        # As many partitions as there are, whatever the connection says, and of those topics that are there.
        there = administering.partition_counts(self._link)
        names = [each for each in there if each in self._entries or self._topology.hold_of(each) is not None]
        if not names:
            return None
        progress = self._progress([(name, lane) for name in names for lane in range(there[name])])
        ends = administering.stable_ends(self._link, [TopicPartition(topic, lane) for topic, lane in progress])
        starts = {each: known.low for each, known in progress.items()}
        for record in self._reader.read_between(starts, ends):
            if progress[record.topic(), record.partition()].is_waiting(record.offset()):
                return str(record.topic())
        return None

    # -- finding -------------------------------------------------------------------------------------------------

    def _find(self, message_ids: set[str]) -> Iterator[Found]:
        """Read every record that is not done.

        What is done is known first and where logs end is known last, so a message that moves meanwhile is in what is
        read at least once.
        """
        topics = [*self._entries, *administering.rungs(self._link, self._topology)]
        progress = self._progress([(topic, lane) for topic in topics for lane in range(self._topology.partitions)])
        places = [TopicPartition(topic, lane) for topic, lane in progress]
        ends = administering.log_ends(self._link, places)
        starts = {each: known.low for each, known in progress.items()}
        wanted = {each.encode() for each in message_ids}
        for record in self._reader.read_between(starts, ends):
            where = (record.topic(), record.partition())
            if progress[where].is_waiting(record.offset()):
                yield from self._look_at(record, wanted)

    def _look_at(self, record: KafkaMessage, wanted: set[bytes]) -> Iterator[Found]:
        topic, key, value = record.topic(), record.key(), record.value() or b""
        if topic == self._topology.control:
            try:
                command = Command.read(value)
            except ValueError:
                return
            message_id, value = command.message_id.encode(), command.envelope
        elif topic == self._topology.inbox and record.headers():
            position = f"{topic}-{record.partition()}-{record.offset()}"
            try:
                message = wire.read_request(
                    position=position,
                    key=key,
                    value=value,
                    headers=record.headers(),
                    timestamp_ms=record.timestamp()[1],
                )
            except ValueError:
                return
            message_id, value = message.id.encode(), wire.write_envelope(message, now_ms=record.timestamp()[1])
        else:
            message_id = (key or b"")[8:]
        if message_id in wanted and value:
            place = Place(topic=topic, lane=record.partition(), offset=record.offset())
            yield Found(place, message_id.decode(), value)

    def _progress(self, places: Sequence[Partition]) -> dict[Partition, Progress]:
        committed = self._reader.committed(places, seconds=self._link.config.confirm_seconds)
        starts = administering.log_starts(self._link, [each for each in committed if each.offset < 0])
        return {(each.topic, each.partition): progress_of(each, starts) for each in committed}

    # -- commanding ----------------------------------------------------------------------------------------------

    def _command(
        self, found: Sequence[Found], change: Change, deliver_at_ms: int | None
    ) -> tuple[set[str], set[Place]]:
        """Return the ids of messages that were changed, and the places where none waits any more."""
        control, since = self._topology.control, self._journal.end()
        commands = {(command := _command_of(each, change, deliver_at_ms)).id: command for each in found}
        publish(
            self._link,
            [
                Outgoing(each.message_id, control, each.write(), each.message_id.encode(), each.place.lane)
                for each in commands.values()
            ],
        )
        answers = self._journal.answers(since, commands, seconds=self._link.config.confirm_seconds)
        if len(answers) < len(commands):
            silent = next(each for each in commands.values() if each.id not in answers)
            raise BrokerError(
                f"{self._link.config.name}: no dispatcher has answered that message {silent.message_id!r} is"
                f" {change.value} within {self._link.config.confirm_seconds:g} s; the command is kept, and obeyed or"
                " refused later: run `airflow delay dispatcher --climb`, then look at the message",
                unconfirmed=[each.message_id for each in commands.values() if each.id not in answers],
            )
        obeyed, gone = set[str](), set[Place]()
        for command_id, was_obeyed in answers.items():
            command = commands[command_id]
            gone.add(command.place)
            if was_obeyed:
                obeyed.add(command.message_id)
        return obeyed, gone

    # -- refusing ------------------------------------------------------------------------------------------------

    def _ended(self, message_ids: Sequence[str], seen: set[str]) -> dict[str, JournalEntry]:
        """Return how messages ended that wait nowhere; one that nobody knows is refused."""
        if not message_ids:
            return {}
        outcomes = self._journal.find(message_ids, self._journal.recently(LOOK_BACK_RECORDS))
        for each in message_ids:
            # One that was seen before has just left, and the journal tells of it in a moment.
            if each not in outcomes and each not in seen:
                raise UnknownMessageError(each)
        return outcomes

    def _require(self, message_id: str, entry: JournalEntry, change: Change) -> None:
        if entry.change is Change.CANCELLED and change is Change.CANCELLED:
            return
        raise LifecycleError(
            message_id,
            f"is {outcome_of(entry.change).name} since {entry.at.isoformat()} and cannot be {change.value} any more;"
            " only a waiting message can",
        )


def _is_in(message_id: str, found: Sequence[Found]) -> bool:
    return any(each.message_id == message_id for each in found)


def _command_of(found: Found, change: Change, deliver_at_ms: int | None) -> Command:
    envelope = wire.Envelope(wire.write_key(0, found.message_id), found.value)
    return Command(
        id=str(uuid4()),
        change=change,
        message_id=found.message_id,
        channel=envelope.channel,
        place=found.place,
        deliver_at_ms=envelope.deliver_at_ms if deliver_at_ms is None else deliver_at_ms,
        envelope=b"" if deliver_at_ms is None else wire.moved_envelope(found.value, deliver_at_ms),
    )
