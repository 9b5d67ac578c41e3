"""Taking a ladder over from plain dispatchers, continuing it from a checkpoint, and giving it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from pyspark.sql import SparkSession

from airflow_delay_provider.brokers.kafka.admin import LadderTopic
from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.progress import Progress, note_of, progress_of, service_of
from airflow_delay_provider.brokers.kafka.reader import PartitionId, Reader, log_ends, log_starts
from airflow_delay_provider.brokers.kafka.recall import read_recalls
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.streaming.checkpoint import CheckpointFiles
from airflow_delay_provider.spark.streaming.intake import Begun
from airflow_delay_provider.spark.streaming.membership import Membership
from airflow_delay_provider.spark.streaming.routing import Routing

#: Characters of the checkpoint's path in the note, beside which the note of the progress must fit.
PATH_LENGTH = 150


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where the query begins, if its checkpoint is new."""

    offsets: dict[PartitionId, int]
    begun: dict[PartitionId, Begun]


def routing_of(spark: SparkSession, checkpoint: str, given: Mapping[str, int | None]) -> Routing:
    """Return the given settings; for those that are not given, those of the checkpoint, or the defaults."""
    known = CheckpointFiles(spark, checkpoint).read("service") or {}
    wanted = {name: known.get(name) if value is None else value for name, value in given.items()}
    return Routing(**{name: value for name, value in wanted.items() if value is not None})


class Takeover:
    """One ladder and one checkpoint.

    Guarantees: the progress in Kafka names this service before any record is taken, and names it until all messages
    that wait in its state are back in the ladder. A crash between any two steps leaves a ladder that this checkpoint
    continues, and nothing else.
    """

    def __init__(
        self,
        clients: KafkaClients,
        files: CheckpointFiles,
        membership: Membership,
        topics: dict[str, LadderTopic],
    ) -> None:
        self._clients = clients
        self._files = files
        self._membership = membership
        self._topics = topics
        self.service_id = ""

    @property
    def service(self) -> str:
        """The name of this service in the progress."""
        return f"spark:{self.service_id}@{quote(self._files.checkpoint)[-PATH_LENGTH:]}"

    def open(self, routing: Routing) -> None:
        """Create what a new checkpoint contains, or refuse one that belongs to something else."""
        prefix = self._clients.config.topology.prefix
        wanted = {"ladder": prefix, "shards": routing.shards, "bucket_ms": routing.bucket_ms}
        known = self._files.read("service")
        if known is None:
            if self._files.is_begun():
                raise ConfigurationError(
                    f"--checkpoint: {self._files.checkpoint} belongs to another query; name an empty folder"
                )
            known = {"id": str(uuid4()), **wanted}
            self._files.write("service", known)
        for name, option in (("ladder", "--connection"), ("shards", "--shards"), ("bucket_ms", "--bucket")):
            if known[name] != wanted[name]:
                raise ConfigurationError(
                    f"{option}: the checkpoint {self._files.checkpoint} was begun with {name} {known[name]}, not"
                    f" {wanted[name]}; use that, or end the service with --release and begin with an empty folder"
                )
        self.service_id = known["id"]

    def claim(self) -> Start:
        """Make the ladder this service's, and return where its query begins."""
        committed = self._membership.committed()
        services = {service_of(each) for each in committed if each.offset >= 0}
        others = [each for each in services if each and not each.startswith(f"spark:{self.service_id}@")]
        if others:
            raise ConfigurationError(
                f"--checkpoint: the ladder {self._clients.config.topology.prefix} is kept by another job's checkpoint"
                f" ({others[0]}); continue with that one, or end it with --release"
            )
        start = self._files.read("start")
        if start is not None:
            if "" in services:
                raise ConfigurationError(
                    f"--checkpoint: the ladder {self._clients.config.topology.prefix} was given back from"
                    f" {self._files.checkpoint}, or served by others since; name an empty folder"
                )
            return _start_of(start)
        return self._begin(committed)

    def note(self, topic: str) -> str:
        """Return what is committed beside an offset while this service has the ladder."""
        return note_of(Progress(0), self._topic_id(topic), service=self.service)

    def give_back(self, ends: dict[PartitionId, int]) -> None:
        """Commit progress that plain dispatchers continue from."""
        self._membership.commit(
            (topic, partition, offset, note_of(Progress(offset), self._topic_id(topic)))
            for (topic, partition), offset in ends.items()
        )

    # -- pieces --------------------------------------------------------------------------------------------------

    def _begin(self, committed: list[Any]) -> Start:
        starts, ends = log_starts(self._clients, committed), log_ends(self._clients, committed)
        progress = {
            (each.topic, each.partition): progress_of(each, starts, ends=ends, topic_id=self._topic_id(each.topic))
            for each in committed
        }
        self._membership.commit(
            (topic, partition, each.low, note_of(each, self._topic_id(topic), service=self.service))
            for (topic, partition), each in progress.items()
        )
        reader = Reader(self._clients)
        try:
            recalls = read_recalls(self._clients, reader, {partition for _, partition in progress})
        finally:
            reader.close()
        content = {
            "offsets": [[topic, partition, each.low] for (topic, partition), each in progress.items()],
            "begun": [
                [
                    topic,
                    partition,
                    each.next,
                    sorted(each.open),
                    sorted(known.offset for known in recalls[partition] if known.topic == topic),
                ]
                for (topic, partition), each in progress.items()
            ],
        }
        self._files.write("start", content)
        return _start_of(content)

    def _topic_id(self, topic: str) -> str:
        known = self._topics.get(topic)
        return "" if known is None else known.id


def _start_of(content: dict[str, Any]) -> Start:
    return Start(
        offsets={(topic, partition): offset for topic, partition, offset in content["offsets"]},
        begun={
            (topic, partition): Begun(next=after, open=frozenset(waiting), recalled=frozenset(recalled))
            for topic, partition, after, waiting, recalled in content["begun"]
            if waiting or recalled or after
        },
    )
