"""Checks that the topics of a ladder are as they must be."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, NewPartitions

from airflow_delay_provider.brokers.kafka.admin import (
    KNOWN_SECONDS,
    LadderTopic,
    ask_of_new,
    create,
    ladder_topics,
    partition_counts,
    settings_of,
    wait_until,
)
from airflow_delay_provider.brokers.kafka.client import DENIED, KafkaClients, code_of
from airflow_delay_provider.brokers.kafka.topology import Topic, Topology
from airflow_delay_provider.brokers.port import TopologyIssue
from airflow_delay_provider.domain.exceptions import BrokerError, ConfigurationError

log = logging.getLogger(__name__)

#: With other settings a waiting message could be lost or stuck.
_MUST_HAVE = ("cleanup.policy", "retention.ms", "retention.bytes", "message.timestamp.type", "max.message.bytes")


def verify(clients: KafkaClients, topology: Topology) -> Iterator[TopologyIssue]:
    """Return what is wrong or risky, without changing anything."""
    there = partition_counts(clients)
    names = [topic.name for topic in topology.topics()]
    missing = [name for name in names if name not in there]
    if len(missing) == len(names):
        yield TopologyIssue(text=f"the ladder {topology.prefix} does not exist; run `airflow delay topology create`")
        return
    for name in missing:
        yield TopologyIssue(text=f"topic {name} is missing; run `airflow delay topology create`")
    yield from _find_wrong(clients, topology, there)
    others = [name for name in there if topology.hold_of(name) is not None and name not in names]
    for name in others:
        if there[name] != topology.partitions:
            yield TopologyIssue(
                text=f"topic {name} has {there[name]} partitions and the connection says {topology.partitions}"
            )
    if others:
        yield _advice(
            f"{len(others)} rungs belong to another radix ({others[0]}, ...): dispatchers serve them; delete them when"
            " all clients use one radix and no message waits in them"
        )
    if topology.inbox in there:
        yield from _find_weak_replication(clients, topology)


def require_complete(clients: KafkaClients, topology: Topology) -> None:
    """Create missing topics, and refuse a ladder that could lose messages."""
    create(clients, topology)
    _refuse_wrong(clients, topology)


def complete(clients: KafkaClients) -> dict[str, LadderTopic]:
    """Prepare a ladder for a dispatcher and return its topics, whatever was done to them.

    Missing topics are created, and all get as many partitions as the one that has most: each partition may contain
    messages.
    """
    topology = clients.config.topology
    create(clients, topology)
    _refuse_wrong(clients, topology, even_if_more_partitions=True)
    topics = ladder_topics(clients)
    wanted = max(each.partitions for each in topics.values())
    few = [name for name, topic in topics.items() if topic.partitions < wanted]
    if not few:
        return topics
    try:
        new = [NewPartitions(name, wanted) for name in few]
        for future in clients.admin().create_partitions(new, request_timeout=clients.ask_seconds).values():
            future.result()
    except KafkaException as error:
        log.warning("%s: partitions cannot be added to %s: %s", clients.config.name, few[0], error.args[0].str())
        return topics
    wait_until(
        lambda: complete_partitions(topology, ladder_topics(clients)) >= wanted,
        f"the topics have {wanted} partitions each",
    )
    log.warning("%s: all topics of %s have %d partitions now", clients.config.name, topology.prefix, wanted)
    return ladder_topics(clients)


def complete_partitions(topology: Topology, topics: Mapping[str, LadderTopic]) -> int:
    """Return how many partitions all topics have."""
    return min((topics[name].partitions for name in _partitioned(topology, topics)), default=0)


def find_unequal_partitions(topology: Topology, topics: Mapping[str, LadderTopic]) -> Iterator[str]:
    """Describe topics with partitions that are not read, or that clients do not know of."""
    partitions = complete_partitions(topology, topics)
    for name in _partitioned(topology, topics):
        have = topics[name].partitions
        if have > partitions:
            yield (
                f"topic {name} has {have} partitions, others {partitions}: the additional ones are not read; give all"
                f" topics of {topology.prefix} {have} partitions with kafka-topics --alter, or let the dispatcher ALTER"
                " them"
            )
        elif have != topology.partitions:
            yield f"topic {name} has {have} partitions and the connection says {topology.partitions}; set it to {have}"


def _partitioned(topology: Topology, topics: Iterable[str]) -> list[str]:
    """Return the topics whose messages stay in one partition: all but dead letters."""
    return [name for name in topics if name != topology.dead]


def require_permitted(clients: KafkaClients, topology: Topology) -> None:
    """Refuse a user that may not write to all topics: later on, the library would not say why."""
    names = [topic.name for topic in topology.topics()]

    def ask() -> dict[str, Any]:
        asked = clients.admin().describe_topics(
            TopicCollection(names), include_authorized_operations=True, request_timeout=clients.ask_seconds
        )
        return {name: future.result().authorized_operations for name, future in asked.items()}

    try:
        answers = ask_of_new(clients, ask, KNOWN_SECONDS)
    except KafkaException as error:
        raise clients.failure(error, "looking for the topics of the ladder") from error
    for name, allowed in answers.items():
        missing = [each.name for each in (AclOperation.READ, AclOperation.WRITE) if each not in (allowed or [each])]
        if missing:
            raise BrokerError(
                f"{clients.config.name}: user {clients.config.user} lacks a permission ({', '.join(missing)} on topic"
                f" {name}); grant it, see docs/kafka.md",
                may_pass=False,
            )


def require_usable(clients: KafkaClients, topology: Topology) -> None:
    """Do the same for a client that only schedules and may not see the rungs."""
    if not {topology.inbox, topology.control, topology.journal} <= partition_counts(clients).keys():
        create(clients, topology)
    _refuse_wrong(clients, topology)


def _refuse_wrong(clients: KafkaClients, topology: Topology, *, even_if_more_partitions: bool = False) -> None:
    there = partition_counts(clients)
    if even_if_more_partitions:
        there = {name: min(count, topology.partitions) for name, count in there.items()}
    problems = [each.text for each in _find_wrong(clients, topology, there) if each.is_problem]
    if problems:
        more = f" (and {len(problems) - 1} more: `airflow delay topology verify`)" if problems[1:] else ""
        raise ConfigurationError(f"{clients.config.name}: {problems[0]}{more}")


def _find_wrong(clients: KafkaClients, topology: Topology, there: Mapping[str, int]) -> Iterator[TopologyIssue]:
    seen = {topic.name: topic for topic in topology.topics() if topic.name in there}
    for name in seen:
        if there[name] != topology.partitions:
            yield TopologyIssue(
                text=f"topic {name} has {there[name]} partitions and the connection says {topology.partitions}; all"
                f" topics of a ladder must have the same number: set partitions to {there[name]}, or use another ladder"
            )
    try:
        settings = settings_of(clients, sorted(seen), seconds=KNOWN_SECONDS)
    except KafkaException as error:
        if code_of(error) not in DENIED:
            raise clients.failure(error, "reading settings") from error
        yield _advice(f"settings were not checked: user {clients.config.user} may not read them (DESCRIBE_CONFIGS)")
        return
    for name, have in settings.items():
        yield from _find_wrong_settings(seen[name], have)


def _find_wrong_settings(topic: Topic, have: Mapping[str, str]) -> Iterator[TopologyIssue]:
    for name in _MUST_HAVE:
        wanted = topic.settings.get(name)
        if wanted is None or _is_good(name, wanted, have.get(name, "")):
            continue
        yield TopologyIssue(
            text=f"topic {topic.name} has {name}={have.get(name)} and needs {wanted}, or waiting messages could be"
            " lost or stuck; set it with kafka-configs, or delete the topic while it contains no message"
        )


def _is_good(name: str, wanted: str, have: str) -> bool:
    if name in ("retention.ms", "retention.bytes"):
        return have == "-1" or (wanted != "-1" and int(have) >= int(wanted))
    if name == "max.message.bytes":
        return int(have) >= int(wanted)
    return have == wanted


def _find_weak_replication(clients: KafkaClients, topology: Topology) -> Iterator[TopologyIssue]:
    inbox = clients.ask(
        lambda: (
            clients.admin()
            .describe_topics(TopicCollection([topology.inbox]), request_timeout=clients.try_seconds)[topology.inbox]
            .result()
        ),
        f"looking for topic {topology.inbox}",
    )
    replicas = min((len(partition.replicas) for partition in inbox.partitions), default=1)
    if replicas == 1:
        yield _advice("the ladder has one replica: if its broker is lost for good, so are waiting messages")
        return
    try:
        in_sync = int(settings_of(clients, [topology.inbox])[topology.inbox]["min.insync.replicas"])
    except KafkaException:
        return
    if in_sync < 2:
        yield _advice(
            f"min.insync.replicas is {in_sync} with {replicas} replicas: a confirmed message may be on one broker only;"
            " set it to 2 for topics that begin with delay.v1"
        )


def _advice(text: str) -> TopologyIssue:
    return TopologyIssue(text=text, is_problem=False)
