"""A partition on a simulated Kafka that is processed without delay, and the results."""

from __future__ import annotations

from typing import Any

from airflow_delay_provider.brokers.kafka import header_protocol as protocol
from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.journal import CommandResult
from airflow_delay_provider.brokers.kafka.recall import Command, RecordPosition
from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message
from tests.unit.brokers.kafka.model import Dispatcher, SimulatedKafka

START_MS = 1_900_000_000_000


class Bench:
    """Time passes only by :meth:`pass_to`, and stops wherever the partition has something to do."""

    def __init__(self, topology: Topology | None = None, *, skew_ms: int = 0) -> None:
        self.topology = topology or Topology()
        self.kafka = SimulatedKafka(self.topology, partition=1)
        self.skew_ms = skew_ms
        self.now_ms = START_MS
        self.kafka.now_ms = START_MS + skew_ms
        self.dispatcher = Dispatcher(self.kafka)

    # -- what users do -------------------------------------------------------------------------------------------

    def envelope(self, message_id: str, delay_ms: int, **options: Any) -> tuple[bytes, bytes]:
        """Return key and value of a message that is due in a while."""
        change = {name: options.pop(name) for name in ("change", "reason") if name in options}
        due_ms = self.now_ms + delay_ms
        fields = {"channel": "orders", "payload": b"x"} | options
        message = Message(id=message_id, deliver_at=from_ms(due_ms), **fields)
        return wire.encode_key(due_ms, message_id), wire.encode_envelope(message, now_ms=self.now_ms, **change)

    def schedule(self, message_id: str, delay_ms: int, **options: Any) -> RecordPosition:
        """Write a message into the inbox."""
        return self.put(self.topology.inbox, *self.envelope(message_id, delay_ms, **options))

    def put(
        self, topic: str, key: bytes | None, value: bytes | None, headers: protocol.Headers | None = None
    ) -> RecordPosition:
        """Write anything anywhere."""
        offset = self.kafka.logs[topic].append(self.kafka.now_ms, key, value, headers)
        return RecordPosition(topic=topic, partition=self.kafka.partition, offset=offset)

    def command(
        self, message_id: str, position: RecordPosition, change: Change = Change.CANCELLED, *, delay_ms: int = 0
    ) -> RecordPosition:
        """Call a message back; the id of the command is that of the message and the change."""
        due_ms = self.now_ms + delay_ms
        _, value = self.envelope(message_id, delay_ms)
        command = Command(
            id=f"{message_id} {change.value}",
            change=change,
            message_id=message_id,
            channel="orders",
            position=position,
            deliver_at_ms=due_ms,
            envelope=b"" if change is Change.CANCELLED else value,
        )
        return self.put(self.topology.control, message_id.encode(), command.encode())

    # -- time ----------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Do everything that there is to do now."""
        self.dispatcher.fetch_all()
        while self.dispatcher.advance(self.now_ms):
            self.dispatcher.commit()
            self.dispatcher.fetch_all()
        self.dispatcher.commit()

    def pass_to(self, milliseconds: int) -> None:
        """Let time pass up to so long after the start."""
        until_ms = START_MS + milliseconds
        while True:
            self.work()
            ready_ms = self.dispatcher.partition.next_ready_ms()
            if ready_ms is None or ready_ms > until_ms:
                break
            assert ready_ms > self.now_ms, "a turn that has come was not taken"
            self.set_clock(ready_ms)
        self.set_clock(until_ms)
        self.work()

    def set_clock(self, now_ms: int) -> None:
        """Let time pass while no dispatcher works."""
        self.now_ms, self.kafka.now_ms = now_ms, now_ms + self.skew_ms

    def restart(self) -> None:
        """Lose everything in memory."""
        self.dispatcher.crash()
        self.dispatcher = Dispatcher(self.kafka)

    # -- what came of it -----------------------------------------------------------------------------------------

    @property
    def delivered(self) -> list[tuple[str, int]]:
        """Ids in the order of delivery, and how long after the start that was."""
        return [(each.envelope.message_id.decode(), each.at_ms - START_MS) for each in self.kafka.delivered]

    @property
    def recorded(self) -> list[tuple[str, Change]]:
        """The entries of the journal."""
        return [(each.message_id.decode(), each.change) for each in self.kafka.journal if each.change is not None]

    @property
    def answers(self) -> list[CommandResult]:
        """What commands were answered."""
        return [result for each in self.kafka.journal if (result := each.result) is not None]

    def rung_of(self, message_id: str) -> RecordPosition | None:
        """Return the rung in which a message rests."""
        for topic, record in self.kafka.waiting():
            if ".rung." in topic and (record.key or b"")[8:] == message_id.encode():
                return RecordPosition(topic=topic, partition=self.kafka.partition, offset=record.offset)
        return None
