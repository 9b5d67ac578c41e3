"""Creates, describes and deletes topics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import ConfigResource, NewTopic

from airflow_delay_provider.brokers.kafka.client import DENIED, MISSING, KafkaClients, code_of
from airflow_delay_provider.brokers.kafka.header_protocol import check_channel
from airflow_delay_provider.brokers.kafka.reader import log_ends, log_starts
from airflow_delay_provider.brokers.kafka.topology import Topic, Topology
from airflow_delay_provider.domain.exceptions import ConfigurationError, MessagesWaitError, UnknownChannelError

#: How long a change of all topics of a ladder may take to reach all nodes; a busy cluster needs some seconds.
KNOWN_SECONDS = 60.0
#: How long a new topic may be unknown to a node.
NEW_TOPIC_SECONDS = 1.0
#: The id in answers of brokers that have no topic ids.
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
_OF_ONE_TOPIC = {KafkaError.TOPIC_EXCEPTION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.REPLICA_NOT_AVAILABLE}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelSettings:
    """The relevant settings of a channel."""

    partitions: int
    max_message_bytes: int = 1_048_588
    retention_ms: int = -1
    is_compacted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderTopic:
    """A topic of a ladder as it exists."""

    partitions: int
    #: Changes if the topic is deleted and created again; empty if the broker has no ids.
    id: str


def create(clients: KafkaClients, topology: Topology) -> None:
    """Create the missing topics of a ladder."""
    there = partition_counts(clients)
    create_topics(clients, topology, [topic for topic in topology.topics() if topic.name not in there])


def create_topics(clients: KafkaClients, topology: Topology, topics: Iterable[Topic]) -> None:
    """Create topics; another client may create them at the same time."""
    new = [
        NewTopic(
            topic.name,
            num_partitions=topology.partitions,
            replication_factor=topology.replication_factor or -1,
            config=dict(topic.settings),
        )
        for topic in topics
    ]
    if not new:
        return
    _for_each(
        clients,
        "creating topic",
        lambda: clients.admin().create_topics(new, request_timeout=clients.ask_seconds),
        good={KafkaError.TOPIC_ALREADY_EXISTS},
    )
    wait_until(lambda: {topic.topic for topic in new} <= partition_counts(clients).keys(), "the new topics are known")


def delete(clients: KafkaClients, topology: Topology) -> None:
    """Delete all topics of the ladder except dead letters, and the progress of its dispatchers.

    Refused while a dispatcher runs, before any topic is deleted.
    """
    _require_no_dispatcher(clients, topology)
    there = partition_counts(clients)
    names = [name for name in there if _is_of(topology, name)]
    if topology.dead in names and _has_records(clients, topology.dead, there[topology.dead]):
        names.remove(topology.dead)
    if names:
        _for_each(
            clients,
            "deleting topic",
            lambda: clients.admin().delete_topics(names, request_timeout=clients.ask_seconds),
            good=MISSING,
        )
        wait_until(lambda: not partition_counts(clients).keys() & set(names), "the topics are deleted")
    _for_each(
        clients,
        "deleting group",
        lambda: clients.admin().delete_consumer_groups([topology.dispatch_group], request_timeout=clients.try_seconds),
        good={KafkaError.GROUP_ID_NOT_FOUND, *DENIED},
    )


def _require_no_dispatcher(clients: KafkaClients, topology: Topology) -> None:
    group = topology.dispatch_group

    def ask() -> list[Any]:
        asked = clients.admin().describe_consumer_groups([group], request_timeout=clients.try_seconds)
        return list(asked[group].result().members)

    try:
        members = clients.ask_again(ask)
    except KafkaException as error:
        if code_of(error) in (KafkaError.GROUP_ID_NOT_FOUND, *DENIED):
            return
        raise clients.failure(error, f"looking for dispatchers of {topology.prefix}") from error
    if members:
        raise MessagesWaitError(
            f"{clients.config.name}: {len(members)} dispatchers serve the ladder {topology.prefix}; stop them first;"
            " one with --instance counts for 10 s more"
        )


def _has_records(clients: KafkaClients, topic: str, partitions: int) -> bool:
    all_of_it = [TopicPartition(topic, number) for number in range(partitions)]
    return log_starts(clients, all_of_it) != log_ends(clients, all_of_it)


def rungs(clients: KafkaClients, topology: Topology) -> dict[str, int]:
    """Return existing rungs and their hold times, also those of another radix: messages may wait in them."""
    there = partition_counts(clients)
    found = {name: hold for name in there if (hold := topology.hold_of(name)) is not None}
    return {name: hold for name, hold in found.items() if there[name] >= topology.partitions}


def ladder_topics(clients: KafkaClients) -> dict[str, LadderTopic]:
    """Return all topics of the ladder, also rungs of another radix."""
    topology = clients.config.topology
    names = sorted(name for name in partition_counts(clients) if _is_of(topology, name))
    return {
        name: LadderTopic(partitions=len(seen.partitions), id=_id_of(seen))
        for name, seen in describe(clients, names).items()
        if not isinstance(seen, KafkaError)
    }


def describe(clients: KafkaClients, names: Sequence[str]) -> dict[str, Any]:
    """Return the library's description of each topic, or its error."""
    if not names:
        return {}

    def ask() -> dict[str, Any]:
        asked = clients.admin().describe_topics(
            TopicCollection(list(names)), include_authorized_operations=True, request_timeout=clients.try_seconds
        )
        return {name: _answer(future) for name, future in asked.items()}

    answers: dict[str, Any] = clients.ask(ask, "looking for topics", seconds=clients.try_seconds)
    return answers


def readable_settings(clients: KafkaClients, names: Sequence[str]) -> dict[str, Mapping[str, str] | None]:
    """Return the settings of topics, None for those that may not be read."""
    if not names:
        return {}
    resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]
    asked = clients.admin().describe_configs(resources, request_timeout=clients.try_seconds)
    answers = {resource.name: _answer(future) for resource, future in asked.items()}
    return {
        name: None if isinstance(answer, KafkaError) else {key: entry.value for key, entry in answer.items()}
        for name, answer in answers.items()
    }


def _answer(future: Future[Any]) -> Any:
    """Return the answer for one topic of a request, or its error if it concerns this topic alone."""
    try:
        return future.result()
    except KafkaException as error:
        if code_of(error) not in MISSING | DENIED | _OF_ONE_TOPIC:
            raise
        return error.args[0]


def _id_of(seen: Any) -> str:
    """Return the id of a topic as text; brokers before 2.8 have none."""
    text = str(seen.topic_id)
    return "" if text in ("", "None", _NO_ID) else text


def partition_counts(clients: KafkaClients) -> dict[str, int]:
    """Return all visible topics and their numbers of partitions."""
    metadata = clients.ask(lambda: clients.admin().list_topics(timeout=clients.try_seconds), "listing topics")
    return {name: len(topic.partitions) for name, topic in metadata.topics.items() if topic.error is None}


def channel_settings(clients: KafkaClients, channel: str) -> ChannelSettings | None:
    """Return the settings of a channel, None if it does not exist; waits a moment for a new one."""
    deadline = time.monotonic() + NEW_TOPIC_SECONDS
    while (partitions := _partition_count(clients, channel)) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    try:
        have = settings_of(clients, [channel])[channel]
    except KafkaException as error:
        if code_of(error) not in DENIED:
            raise clients.failure(error, f"reading settings of {channel}") from error
        return ChannelSettings(partitions=partitions)
    return ChannelSettings(
        partitions=partitions,
        max_message_bytes=int(have["max.message.bytes"]),
        retention_ms=int(have["retention.ms"]) if "delete" in have["cleanup.policy"] else -1,
        is_compacted="compact" in have["cleanup.policy"],
    )


def require_channel(clients: KafkaClients, channel: str) -> ChannelSettings:
    """Return the settings of a channel; refuse one that does not exist."""
    check_channel(channel)
    settings = channel_settings(clients, channel)
    if settings is None:
        raise UnknownChannelError(
            "channel", f"{clients.config.name} has no topic {channel!r}", "create it, or correct the name"
        )
    return settings


def _partition_count(clients: KafkaClients, topic: str) -> int | None:
    def ask() -> int:
        asked = clients.admin().describe_topics(TopicCollection([topic]), request_timeout=clients.try_seconds)
        return len(asked[topic].result().partitions)

    try:
        count: int = clients.ask_again(ask)
    except KafkaException as error:
        if code_of(error) in MISSING:
            return None
        raise clients.failure(error, f"looking for topic {topic}") from error
    return count


def settings_of(
    clients: KafkaClients, topics: Iterable[str], *, seconds: float | None = None
) -> dict[str, Mapping[str, str]]:
    """Return the settings of topics; raises the library's error if they may not be read."""
    resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in topics]
    if not resources:
        return {}

    def ask() -> dict[str, Mapping[str, str]]:
        patience = clients.try_seconds if seconds is None else clients.ask_seconds
        answers = clients.admin().describe_configs(resources, request_timeout=patience)
        return {
            resource.name: {name: entry.value for name, entry in future.result().items()}
            for resource, future in answers.items()
        }

    settings: dict[str, Mapping[str, str]] = ask_of_new(clients, ask, seconds)
    return settings


def ask_of_new(clients: KafkaClients, question: Callable[[], Any], seconds: float | None) -> Any:
    """Ask about existing topics; the node may learn of a new one a moment later."""
    deadline = time.monotonic() + KNOWN_SECONDS
    while True:
        try:
            return clients.ask_again(question, seconds=seconds)
        except KafkaException as error:
            if code_of(error) not in MISSING or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _for_each(
    clients: KafkaClients, doing: str, change: Callable[[], Mapping[str, Future[Any]]], *, good: Set[int]
) -> None:
    """Request a change by names, and again after errors that may pass: the change may be done by then."""
    failed = ""

    def ask() -> None:
        nonlocal failed
        for name, future in change().items():
            try:
                future.result()
            except KafkaException as error:
                if code_of(error) not in good:
                    failed = name
                    raise

    try:
        clients.ask_again(ask, seconds=KNOWN_SECONDS)
    except KafkaException as error:
        raise clients.failure(error, f"{doing} {failed}") from error


def _is_of(topology: Topology, name: str) -> bool:
    own = {topic.name for topic in topology.topics()}
    return name in own or topology.hold_of(name) is not None


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Wait until the cluster knows of a change."""
    deadline = time.monotonic() + KNOWN_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise ConfigurationError(f"{what}: not within {KNOWN_SECONDS:g} s; read the broker's log")
        time.sleep(0.02)
