"""Many records on their way at once, each confirmed by the broker or named as unconfirmed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Message as KafkaMessage

from airflow_delay_provider.brokers.kafka.errors import DENIED, LOGIN, MISSING, UNFIT
from airflow_delay_provider.brokers.kafka.wire import Headers, message_id_of
from airflow_delay_provider.exceptions import BrokerError, DelayError, Reach

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.kafka.link import Link


class Outgoing(NamedTuple):
    """A record to write, and whose it is."""

    message_id: str
    topic: str
    value: bytes
    key: bytes | None
    #: -1 is the one of its key.
    partition: int = -1
    #: None is a record of the ladder, whose key tells its id.
    headers: Headers | None = None


def publish(link: Link, records: Iterable[Outgoing]) -> None:
    """Write all; return when every one is confirmed, and raise with the ids of those that are not.

    The library reports failures only. What is not reported and not on its way any more is confirmed, by all replicas
    that are in sync.
    """
    producer, failed, sent = link.producer(), dict[str, KafkaError](), list[str]()
    records = iter(records)

    def note_held(error: KafkaError | None, record: KafkaMessage) -> None:
        if error is not None:
            failed[message_id_of(record.key())] = error

    def note(message_id: str) -> Callable[[KafkaError | None, KafkaMessage], None]:
        return lambda error, _record: failed.__setitem__(message_id, error) if error is not None else None

    try:
        for message_id, topic, value, key, partition, headers in records:
            sent.append(message_id)
            while True:
                try:
                    if headers is None and key is not None:
                        producer.produce(topic, value, key, partition, note_held)
                    else:
                        producer.produce(topic, value, key, partition, note(message_id), headers=headers or [])
                except BufferError:
                    producer.poll(0.05)
                else:
                    break
        left = producer.flush(link.config.confirm_seconds + 5)
    except KafkaException as error:
        link.forget_producer()
        # Those that it did not come to are not confirmed either.
        sent += [record.message_id for record in records]
        raise _unconfirmed(link, error.args[0], sent, len(sent)) from error
    if left:
        link.forget_producer()
        raise _unconfirmed(link, KafkaError(KafkaError._TIMED_OUT), sent, len(sent))
    if failed:
        if any(error.fatal() for error in failed.values()):
            link.forget_producer()
        raise _unconfirmed(link, next(iter(failed.values())), failed, len(sent))


def _unconfirmed(link: Link, error: KafkaError, message_ids: Iterable[str], total: int) -> DelayError:
    ids = list(dict.fromkeys(message_ids))
    told = link.failure(error, f"{len(ids)} of {total} records are not confirmed")
    if not isinstance(told, BrokerError) and (len(ids) < total or error.code() not in MISSING | UNFIT):
        # What is true of one record need not be true of the others, and some are confirmed.
        told = BrokerError(str(told), may_pass=False, reach=told.reach)
    if error.code() > 0 and error.code() not in DENIED | LOGIN and told.reach is Reach.BROKER:
        # The broker has answered, so it is the topic that takes nothing.
        told.reach = Reach.CHANNEL
    told.unconfirmed = tuple(ids)
    return told
