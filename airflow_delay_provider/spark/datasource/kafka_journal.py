"""The journal of a Kafka ladder: committed records of its topic, divided by partition and offset."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from confluent_kafka import TopicCollection, TopicPartition
from confluent_kafka.admin import OffsetSpec

from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.journal import EncodedEntry, decode_entries
from airflow_delay_provider.brokers.kafka.reader import Reader, log_starts, stable_ends
from airflow_delay_provider.domain.clock import floor_ms
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.connection import JobConnection
from airflow_delay_provider.spark.datasource.filters import Condition, accepted, earliest
from airflow_delay_provider.spark.datasource.journal import JournalTable, TimeSource, make_journal_batch
from airflow_delay_provider.spark.datasource.positions import JournalPosition
from airflow_delay_provider.spark.datasource.ranges import Range, split

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 20_000
#: A record is appended when its entries happen, or later. Clocks may differ by less than this.
CLOCK_SKEW = timedelta(days=1)
#: One record holds all entries of a transaction, usually hundreds.
_ENTRIES_OF_RECORD = 100


class KafkaJournal(JournalTable):
    """Records of each partition."""

    @classmethod
    def end(cls, connection: JobConnection, *, copy_of: JobConnection | None) -> JournalPosition:  # noqa: ARG003
        with _clients_of(connection) as clients:
            topic = clients.config.topology.journal
            ends = stable_ends(clients, _partitions(clients))
            return JournalPosition(
                journal=f"kafka {topic} {_topic_id(clients, topic)}",
                taken_at_ms=int(time.time() * 1000),
                numbers=tuple(ends[topic, number] for number in range(clients.config.topology.partitions)),
            )

    def find_gap(self) -> str | None:
        after = () if self.section.after is None else self.section.after.numbers
        with _clients_of(self.section.connection) as clients:
            starts = _starts(clients)
        lost = sum(max(0, start - offset) for start, offset in zip(starts, after, strict=True))
        if not lost:
            return None
        return f"{lost} records behind the position are deleted, because the journal keeps entries only for a while"

    def applies(self, condition: Condition) -> bool:
        return condition.operator == "in" and condition.column in ("change", "channel")

    def divide(self, conditions: Sequence[Condition]) -> Sequence[Range]:
        section = self.section
        with _clients_of(section.connection) as clients:
            begins = _starts(clients)
            since = earliest(conditions, "at")
            if since is not None:
                begins = _at_least(begins, _offsets_since(clients, floor_ms(since - CLOCK_SKEW)))
        if section.after is not None:
            begins = _at_least(begins, section.after.numbers)
        sections = list(enumerate(zip(begins, section.until.numbers, strict=True)))
        total = sum(max(0, end - begin) for _, (begin, end) in sections)
        pieces = section.partitions or max(len(begins), total * _ENTRIES_OF_RECORD // 1_000_000)
        return [
            each
            for number, (begin, end) in sections
            for each in split(begin, end, max(1, round(pieces * (end - begin) / max(1, total))), partition=number)
        ]

    def read(self, part: Range, conditions: Sequence[Condition]) -> Iterator[pa.RecordBatch]:
        changes, channels = accepted(conditions, "change"), accepted(conditions, "channel")
        wanted_channels = None if channels is None else {each.encode() for each in channels}
        page: list[tuple[EncodedEntry, str]] = []
        with _clients_of(self.section.connection) as clients:
            where = (clients.config.topology.journal, part.partition)
            for record in Reader(clients).read_between({where: part.start}, {where: part.end}):
                if record.offset() >= part.end:
                    continue
                for index, entry in enumerate(decode_entries(record.value() or b"")):
                    if entry.change is None or (changes is not None and entry.change not in changes):
                        continue
                    if wanted_channels is None or entry.channel in wanted_channels:
                        page.append((entry, f"{part.partition}:{record.offset()}.{index}"))
                if len(page) >= _ROWS:
                    yield self._batch(page)
                    page = []
        if page:
            yield self._batch(page)

    def _batch(self, page: Sequence[tuple[EncodedEntry, str]]) -> pa.RecordBatch:
        values: dict[str, Any] = {
            "message_id": [_text(entry.message_id) for entry, _ in page],
            "channel": [_text(entry.channel) for entry, _ in page],
            "change": [entry.change for entry, _ in page],
            "at_ms": [entry.at_ms for entry, _ in page],
            "deliver_at_ms": [entry.deliver_at_ms for entry, _ in page],
            "reason": [_text(entry.reason) or None for entry, _ in page],
            "position": [position for _, position in page],
            "time_source": TimeSource.RECORDED.value,
            "connection": self.section.connection.conn_id,
            "destination": self.section.connection.conn_id,
        }
        return make_journal_batch(self.section.columns, values, rows=len(page))


@contextmanager
def _clients_of(connection: JobConnection) -> Iterator[KafkaClients]:
    extra = connection.extra_dejson
    config = KafkaConfig.from_settings(
        extra, host=connection.host, port=connection.port, login=connection.login, password=connection.password
    )
    with closing(KafkaClients(config)) as clients:
        yield clients


def _partitions(clients: KafkaClients) -> list[TopicPartition]:
    topology = clients.config.topology
    return [TopicPartition(topology.journal, number) for number in range(topology.partitions)]


def _starts(clients: KafkaClients) -> tuple[int, ...]:
    starts = log_starts(clients, _partitions(clients))
    topic = clients.config.topology.journal
    return tuple(starts[topic, number] for number in range(clients.config.topology.partitions))


def _offsets_since(clients: KafkaClients, moment_ms: int) -> tuple[int, ...]:
    """Return the first offset of each partition that was appended at a time or later; its end if there is none."""
    question = {each: OffsetSpec.for_timestamp(moment_ms) for each in _partitions(clients)}

    def ask() -> dict[int, int]:
        answers = clients.admin().list_offsets(question, request_timeout=clients.try_seconds)
        return {each.partition: future.result().offset for each, future in answers.items()}

    found: dict[int, int] = clients.ask(ask, "reading the offsets of topics")
    ends = stable_ends(clients, _partitions(clients))
    topic = clients.config.topology.journal
    return tuple(found[number] if found[number] >= 0 else ends[topic, number] for number in sorted(found))


def _topic_id(clients: KafkaClients, topic: str) -> str:
    """Return the id of the topic, which a topic that is deleted and created again does not keep."""

    def ask() -> Any:
        return clients.admin().describe_topics(TopicCollection([topic]))[topic].result(clients.try_seconds)

    found = clients.ask(ask, f"looking for {topic}")
    if len(found.partitions) != clients.config.topology.partitions:
        raise ConfigurationError(
            f"partitions: the connection says {clients.config.topology.partitions}, and topic {topic} has"
            f" {len(found.partitions)}; correct the extra of the connection"
        )
    return str(found.topic_id)


def _at_least(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(max(pair) for pair in zip(one, other, strict=True))


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
