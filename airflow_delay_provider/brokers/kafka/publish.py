"""Publishing: many records in transit at once, each confirmed by the broker or named as unconfirmed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Message as KafkaMessage

from airflow_delay_provider.brokers.kafka import admin, wire
from airflow_delay_provider.brokers.kafka.admin import ChannelSettings
from airflow_delay_provider.brokers.kafka.client import DENIED, LOGIN, MISSING, UNFIT, KafkaClients
from airflow_delay_provider.brokers.kafka.header_protocol import Headers
from airflow_delay_provider.brokers.kafka.journal import encode_entry
from airflow_delay_provider.brokers.kafka.topology import MAX_VALUE_BYTES
from airflow_delay_provider.domain.clock import ceil_ms
from airflow_delay_provider.domain.exceptions import (
    BrokerError,
    ChannelError,
    DelayError,
    InvalidMessageError,
    PayloadError,
    Reach,
)
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message

#: How long the settings of a channel are cached.
CACHE_SECONDS = 60.0
#: Overhead of a record besides payload, key and headers.
OVERHEAD_BYTES = 1000
#: A topic that deletes messages sooner could lose one before it is read.
SHORTEST_RETENTION_MS = 60_000


class OutgoingRecord(NamedTuple):
    """A record to write, and the message it belongs to."""

    message_id: str
    topic: str
    value: bytes
    key: bytes | None
    #: -1 is the partition of its key.
    partition: int = -1
    #: None for a record of the ladder, whose key contains the id.
    headers: Headers | None = None


class Publisher:
    """Writes messages to the inbox, or directly to their channels if they are due."""

    def __init__(self, clients: KafkaClients) -> None:
        self._clients = clients
        self._topology = clients.config.topology
        self._channels: dict[str, tuple[float, ChannelSettings]] = {}

    def check_channel(self, channel: str) -> ChannelSettings:
        """Return the settings of a channel; refuse one that does not exist or could lose messages."""
        known = self._channels.get(channel)
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        settings = admin.require_channel(self._clients, channel)
        if 0 <= settings.retention_ms < SHORTEST_RETENTION_MS:
            raise ChannelError(
                f"{self._clients.config.name}: topic {channel} deletes messages after {settings.retention_ms} ms,"
                f" perhaps before they are read; set its retention.ms to {SHORTEST_RETENTION_MS} or more"
            )
        self._channels[channel] = (time.monotonic() + CACHE_SECONDS, settings)
        return settings

    def check(self, messages: Sequence[Message]) -> None:
        """Refuse messages that their channels would not accept."""
        settings = {channel: self.check_channel(channel) for channel in {message.channel for message in messages}}
        for message in messages:
            _require_accepted(message, settings[message.channel])

    def waiting(
        self, message: Message, until_ms: int, now_ms: int, *, change: Change | None = None, reason: str | None = None
    ) -> OutgoingRecord:
        """Return the inbox record of a message that begins to wait."""
        return OutgoingRecord(
            message.id,
            self._topology.inbox,
            wire.encode_envelope(message, now_ms=now_ms, change=change, reason=reason),
            wire.encode_key(until_ms, message.id),
            self._topology.partition_of(message.key, message.id),
        )

    def publish(
        self,
        waiting: Iterable[OutgoingRecord],
        due: Sequence[Message],
        now_ms: int,
        *,
        channel: str | None = None,
        change: Change | None = None,
        reason: str | None = None,
    ) -> None:
        """Write waiting messages to the inbox, and due ones to ``channel`` or their own.

        Dispatchers do not see the due ones, so they are recorded in the journal here, once they are confirmed.
        """
        direct = [
            OutgoingRecord(
                message.id,
                channel or message.channel,
                message.payload,
                None if message.key is None else message.key.encode(),
                headers=wire.encode_headers(
                    message, now_ms=now_ms, topic=channel or message.channel, change=change, reason=reason
                ),
            )
            for message in due
        ]
        try:
            publish(self._clients, chain(waiting, direct))
        except BrokerError as error:
            self._record([each for each in due if each.id not in error.unconfirmed], now_ms, change, reason)
            raise
        self._record(due, now_ms, change, reason)

    def _record(self, messages: Sequence[Message], now_ms: int, change: Change | None, reason: str | None) -> None:
        """Append to the journal that messages were written to a channel."""
        match change:
            case Change.REQUEUED:
                changes = [Change.REQUEUED, Change.DISPATCHED]
            case Change.DEAD_LETTERED:
                changes = [Change.DEAD_LETTERED]
            case _:
                changes = [Change.DISPATCHED]
        records = []
        for message in messages:
            envelope = wire.encode_envelope(message, now_ms=now_ms)
            entries = [
                encode_entry(
                    each,
                    at_ms=now_ms,
                    deliver_at_ms=ceil_ms(message.deliver_at),
                    message_id=message.id.encode(),
                    channel=message.channel,
                    reason=None if each is Change.DISPATCHED else reason,
                    envelope=envelope if index == 0 else b"",
                )
                for index, each in enumerate(changes)
            ]
            partition = self._topology.partition_of(message.key, message.id)
            records.append(OutgoingRecord(message.id, self._topology.journal, b"".join(entries), None, partition))
        publish(self._clients, records)


def publish(clients: KafkaClients, records: Iterable[OutgoingRecord]) -> None:
    """Write all records; return when each is confirmed, or raise with the ids of those that are not.

    The library reports failures only. A record that is neither reported nor in transit is confirmed by all replicas in
    sync.
    """
    producer, failed, sent = clients.producer(), dict[str, KafkaError](), list[str]()
    records = iter(records)

    def note_waiting(error: KafkaError | None, record: KafkaMessage) -> None:
        if error is not None:
            failed[wire.message_id_of(record.key())] = error

    def note(message_id: str) -> Callable[[KafkaError | None, KafkaMessage], None]:
        return lambda error, _record: failed.__setitem__(message_id, error) if error is not None else None

    try:
        for message_id, topic, value, key, partition, headers in records:
            sent.append(message_id)
            while True:
                try:
                    if headers is None and key is not None:
                        producer.produce(topic, value, key, partition, note_waiting)
                    else:
                        producer.produce(topic, value, key, partition, note(message_id), headers=headers or [])
                except BufferError:
                    producer.poll(0.05)
                else:
                    break
        left = producer.flush(clients.config.confirm_seconds + 5)
    except KafkaException as error:
        clients.forget_producer()
        # The remaining ones are not confirmed either.
        sent += [record.message_id for record in records]
        raise _unconfirmed(clients, error.args[0], sent, len(sent)) from error
    if left:
        clients.forget_producer()
        raise _unconfirmed(clients, KafkaError(KafkaError._TIMED_OUT), sent, len(sent))
    if failed:
        if any(error.fatal() for error in failed.values()):
            clients.forget_producer()
        raise _unconfirmed(clients, next(iter(failed.values())), failed, len(sent))


def _unconfirmed(clients: KafkaClients, error: KafkaError, message_ids: Iterable[str], total: int) -> DelayError:
    ids = list(dict.fromkeys(message_ids))
    failure = clients.failure(error, f"{len(ids)} of {total} records are not confirmed")
    if not isinstance(failure, BrokerError) and (len(ids) < total or error.code() not in MISSING | UNFIT):
        # The error of one record need not apply to the others, and some are confirmed.
        failure = BrokerError(str(failure), may_pass=False, reach=failure.reach)
    if error.code() > 0 and error.code() not in DENIED | LOGIN and failure.reach is Reach.BROKER:
        # The broker has answered, so it is the topic that refuses.
        failure.reach = Reach.CHANNEL
    failure.unconfirmed = tuple(ids)
    return failure


def _require_accepted(message: Message, settings: ChannelSettings) -> None:
    """Refuse a message that its channel would not accept."""
    size = len(message.payload) + OVERHEAD_BYTES
    most = min(settings.max_message_bytes, MAX_VALUE_BYTES)
    if message.headers:
        size += sum(len(name) + len(value) for name, value in message.headers.items())
    if size > most:
        raise PayloadError(
            "payload",
            f"message {message.id!r} of {len(message.payload)} bytes does not fit into topic {message.channel!r},"
            f" which accepts {most} with all headers",
            "send a reference to the data, or raise max.message.bytes of the topic",
        )
    if settings.is_compacted and message.key is None:
        raise InvalidMessageError(
            "key", f"topic {message.channel!r} is compacted and accepts no message without one", "give a key"
        )
