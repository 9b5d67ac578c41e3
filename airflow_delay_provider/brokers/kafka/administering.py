"""Creating, checking and deleting the topics of a ladder, and looking at channels."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AclOperation, ConfigResource, NewPartitions, NewTopic, OffsetSpec

from airflow_delay_provider.brokers.base import Finding
from airflow_delay_provider.brokers.kafka.errors import DENIED, MISSING, code_of
from airflow_delay_provider.exceptions import BrokerError, ConfigurationError, MessagesWaitError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.kafka.link import Link
    from airflow_delay_provider.brokers.kafka.topology import Topic, Topology

log = logging.getLogger(__name__)

#: How long a change of all topics of a ladder may take until it is known; a busy cluster needs some seconds for that.
KNOWN_SECONDS = 60.0
#: How long a broker may not know yet of a topic that was just created.
NEW_TOPIC_SECONDS = 1.0
#: A channel that forgets messages sooner than this could lose one before anybody has read it.
SHORTEST_RETENTION_MS = 60_000
#: What brokers that know no ids of topics say.
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
_OF_ONE_TOPIC = {KafkaError.TOPIC_EXCEPTION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.REPLICA_NOT_AVAILABLE}
#: Settings with which a message that waits could be forgotten, or kept from moving on.
_MUST_HAVE = ("cleanup.policy", "retention.ms", "retention.bytes", "message.timestamp.type", "max.message.bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelFacts:
    """What matters of a topic that messages are delivered to."""

    partitions: int
    max_message_bytes: int = 1_048_588
    retention_ms: int = -1
    is_compacted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderTopic:
    """A topic of a ladder as it is."""

    partitions: int
    #: Another one after the topic was deleted and created again; empty where the broker has none.
    id: str


def create(link: Link, topology: Topology) -> None:
    """Create the topics that are missing."""
    there = partition_counts(link)
    create_topics(link, topology, [topic for topic in topology.topics() if topic.name not in there])


def create_topics(link: Link, topology: Topology, topics: Iterable[Topic]) -> None:
    """Create topics; one that somebody else creates at the same moment is there all the same."""
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
        link,
        "creating topic",
        lambda: link.admin().create_topics(new, request_timeout=link.ask_seconds),
        good={KafkaError.TOPIC_ALREADY_EXISTS},
    )
    _wait_until(lambda: {topic.topic for topic in new} <= partition_counts(link).keys(), "the new topics are known")


def verify(link: Link, topology: Topology) -> Iterator[Finding]:
    """Say what is wrong or needs care; nothing is changed."""
    there = partition_counts(link)
    names = [topic.name for topic in topology.topics()]
    missing = [name for name in names if name not in there]
    if len(missing) == len(names):
        yield Finding(text=f"the ladder {topology.prefix} does not exist; run `airflow delay topology create`")
        return
    for name in missing:
        yield Finding(text=f"topic {name} is missing; run `airflow delay topology create`")
    yield from _find_wrong(link, topology, there)
    others = [name for name in there if topology.hold_of(name) is not None and name not in names]
    for name in others:
        if there[name] != topology.partitions:
            yield Finding(
                text=f"topic {name} has {there[name]} partitions and the connection says {topology.partitions}"
            )
    if others:
        yield _advice(
            f"{len(others)} rungs belong to another radix ({others[0]}, ...): dispatchers serve them; once all use one"
            " radix and nothing waits in them, they can be deleted"
        )
    if topology.inbox in there:
        yield from _find_weak_replication(link, topology)


def require_complete(link: Link, topology: Topology) -> None:
    """Create what is missing; refuse to go on with a ladder that could lose messages."""
    create(link, topology)
    _refuse_wrong(link, topology)


def complete(link: Link) -> dict[str, LadderTopic]:
    """Make a ladder ready to be climbed and return its topics, whatever was done to it.

    Missing topics are created, and all get as many partitions as the one that has most: somebody may have written to
    each of them.
    """
    topology = link.config.topology
    create(link, topology)
    _refuse_wrong(link, topology, even_if_more_partitions=True)
    topics = ladder_topics(link)
    wanted = max(each.partitions for each in topics.values())
    few = [name for name, topic in topics.items() if topic.partitions < wanted]
    if not few:
        return topics
    try:
        new = [NewPartitions(name, wanted) for name in few]
        for future in link.admin().create_partitions(new, request_timeout=link.ask_seconds).values():
            future.result()
    except KafkaException as error:
        log.warning("%s: partitions cannot be added to %s: %s", link.config.name, few[0], error.args[0].str())
        return topics
    _wait_until(
        lambda: complete_lanes(topology, ladder_topics(link)) >= wanted, f"the topics have {wanted} partitions each"
    )
    log.warning("%s: all topics of %s have %d partitions now", link.config.name, topology.prefix, wanted)
    return ladder_topics(link)


def complete_lanes(topology: Topology, topics: Mapping[str, LadderTopic]) -> int:
    """Return how many lanes have all of their partitions."""
    return min((topics[name].partitions for name in _in_lanes(topology, topics)), default=0)


def find_unequal(topology: Topology, topics: Mapping[str, LadderTopic]) -> Iterator[str]:
    """Say which topics have partitions that nobody reads, or that clients do not know of."""
    lanes = complete_lanes(topology, topics)
    for name in _in_lanes(topology, topics):
        have = topics[name].partitions
        if have > lanes:
            yield (
                f"topic {name} has {have} partitions and others {lanes}: records in the others are not read; give all"
                f" topics of {topology.prefix} {have} partitions with kafka-topics --alter, or let the dispatcher ALTER"
                " them"
            )
        elif have != topology.partitions:
            yield f"topic {name} has {have} partitions and the connection says {topology.partitions}; set it to {have}"


def _in_lanes(topology: Topology, topics: Iterable[str]) -> list[str]:
    """Return those topics whose partitions are lanes; dead letters lie anywhere."""
    return [name for name in topics if name != topology.dead]


def require_permitted(link: Link, topology: Topology) -> None:
    """Refuse to dispatch for a user who may not write everywhere: in the middle of it the library would not say why."""
    names = [topic.name for topic in topology.topics()]

    def ask() -> dict[str, Any]:
        asked = link.admin().describe_topics(
            TopicCollection(names), include_authorized_operations=True, request_timeout=link.ask_seconds
        )
        return {name: future.result().authorized_operations for name, future in asked.items()}

    try:
        answers = _ask_of_new(link, ask, KNOWN_SECONDS)
    except KafkaException as error:
        raise link.failure(error, "looking for the topics of the ladder") from error
    for name, allowed in answers.items():
        missing = [each.name for each in (AclOperation.READ, AclOperation.WRITE) if each not in (allowed or [each])]
        if missing:
            raise BrokerError(
                f"{link.config.name}: user {link.config.user} lacks a permission ({', '.join(missing)} on topic"
                f" {name}); grant it, see docs/kafka.md",
                may_pass=False,
            )


def require_usable(link: Link, topology: Topology) -> None:
    """Do the same as far as somebody needs it who only schedules, and may not see the rungs."""
    if not {topology.inbox, topology.control, topology.journal} <= partition_counts(link).keys():
        create(link, topology)
    _refuse_wrong(link, topology)


def _refuse_wrong(link: Link, topology: Topology, *, even_if_more_partitions: bool = False) -> None:
    there = partition_counts(link)
    if even_if_more_partitions:
        there = {name: min(count, topology.partitions) for name, count in there.items()}
    problems = [each.text for each in _find_wrong(link, topology, there) if each.is_problem]
    if problems:
        more = f" (and {len(problems) - 1} more: `airflow delay topology verify`)" if problems[1:] else ""
        raise ConfigurationError(f"{link.config.name}: {problems[0]}{more}")


def _find_wrong(link: Link, topology: Topology, there: Mapping[str, int]) -> Iterator[Finding]:
    seen = {topic.name: topic for topic in topology.topics() if topic.name in there}
    for name in seen:
        if there[name] != topology.partitions:
            yield Finding(
                text=f"topic {name} has {there[name]} partitions and the connection says {topology.partitions}; all"
                f" topics of a ladder must have the same number: set partitions to {there[name]}, or use another ladder"
            )
    try:
        settings = settings_of(link, sorted(seen), seconds=KNOWN_SECONDS)
    except KafkaException as error:
        if code_of(error) not in DENIED:
            raise link.failure(error, "reading settings") from error
        yield _advice(f"settings were not checked: user {link.config.user} may not read them (DESCRIBE_CONFIGS)")
        return
    for name, have in settings.items():
        yield from _find_wrong_settings(seen[name], have)


def delete(link: Link, topology: Topology) -> None:
    """Delete all topics of the ladder, but for dead letters, and what its dispatchers have done.

    Refused while a dispatcher runs, before anything is gone.
    """
    _require_no_dispatcher(link, topology)
    there = partition_counts(link)
    names = [name for name in there if _is_of(topology, name)]
    if topology.dead in names and _has_records(link, topology.dead, there[topology.dead]):
        names.remove(topology.dead)
    if names:
        _for_each(
            link,
            "deleting topic",
            lambda: link.admin().delete_topics(names, request_timeout=link.ask_seconds),
            good=MISSING,
        )
        _wait_until(lambda: not partition_counts(link).keys() & set(names), "the topics are gone")
    _for_each(
        link,
        "deleting group",
        lambda: link.admin().delete_consumer_groups([topology.dispatch_group], request_timeout=link.try_seconds),
        good={KafkaError.GROUP_ID_NOT_FOUND, *DENIED},
    )


def _require_no_dispatcher(link: Link, topology: Topology) -> None:
    group = topology.dispatch_group

    def ask() -> list[Any]:
        asked = link.admin().describe_consumer_groups([group], request_timeout=link.try_seconds)
        return list(asked[group].result().members)

    try:
        members = link.ask_again(ask)
    except KafkaException as error:
        if code_of(error) in (KafkaError.GROUP_ID_NOT_FOUND, *DENIED):
            return
        raise link.failure(error, f"looking for dispatchers of {topology.prefix}") from error
    if members:
        raise MessagesWaitError(
            f"{link.config.name}: {len(members)} dispatchers serve the ladder {topology.prefix}; stop them first; one"
            " with --instance counts for 10 s more"
        )


def _has_records(link: Link, topic: str, partitions: int) -> bool:
    places = [TopicPartition(topic, number) for number in range(partitions)]
    return log_starts(link, places) != log_ends(link, places)


def rungs(link: Link, topology: Topology) -> dict[str, int]:
    """Return the rungs that exist and their holds, also those of another radix: messages may wait in them."""
    there = partition_counts(link)
    found = {name: hold for name in there if (hold := topology.hold_of(name)) is not None}
    return {name: hold for name, hold in found.items() if there[name] >= topology.partitions}


def ladder_topics(link: Link) -> dict[str, LadderTopic]:
    """Return all topics of the ladder, also rungs of another radix."""
    topology = link.config.topology
    names = sorted(name for name in partition_counts(link) if _is_of(topology, name))
    return {
        name: LadderTopic(partitions=len(seen.partitions), id=_id_of(seen))
        for name, seen in describe(link, names).items()
        if not isinstance(seen, KafkaError)
    }


def describe(link: Link, names: Sequence[str]) -> dict[str, Any]:
    """Return the library's description of each topic, or its error."""
    if not names:
        return {}

    def ask() -> dict[str, Any]:
        asked = link.admin().describe_topics(
            TopicCollection(list(names)), include_authorized_operations=True, request_timeout=link.try_seconds
        )
        return {name: _answer(future) for name, future in asked.items()}

    answers: dict[str, Any] = link.ask(ask, "looking for topics", seconds=link.try_seconds)
    return answers


def readable_settings(link: Link, names: Sequence[str]) -> dict[str, Mapping[str, str] | None]:
    """Return the settings of topics, None of those that may not be read."""
    if not names:
        return {}
    resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]
    asked = link.admin().describe_configs(resources, request_timeout=link.try_seconds)
    answers = {resource.name: _answer(future) for resource, future in asked.items()}
    return {
        name: None if isinstance(answer, KafkaError) else {key: entry.value for key, entry in answer.items()}
        for name, answer in answers.items()
    }


def _answer(future: Future[Any]) -> Any:
    """Return what came of one of several questions; an error is left to the caller if it is of this one alone."""
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


def partition_counts(link: Link) -> dict[str, int]:
    """Return all topics that can be seen."""
    metadata = link.ask(lambda: link.admin().list_topics(timeout=link.try_seconds), "listing topics")
    return {name: len(topic.partitions) for name, topic in metadata.topics.items() if topic.error is None}


def channel_facts(link: Link, channel: str) -> ChannelFacts | None:
    """Return what matters of a channel, None where there is no such topic; a new one is waited for."""
    deadline = time.monotonic() + NEW_TOPIC_SECONDS
    while (partitions := _partition_count(link, channel)) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    try:
        have = settings_of(link, [channel])[channel]
    except KafkaException as error:
        if code_of(error) not in DENIED:
            raise link.failure(error, f"reading settings of {channel}") from error
        return ChannelFacts(partitions=partitions)
    return ChannelFacts(
        partitions=partitions,
        max_message_bytes=int(have["max.message.bytes"]),
        retention_ms=int(have["retention.ms"]) if "delete" in have["cleanup.policy"] else -1,
        is_compacted="compact" in have["cleanup.policy"],
    )


def _partition_count(link: Link, topic: str) -> int | None:
    def ask() -> int:
        asked = link.admin().describe_topics(TopicCollection([topic]), request_timeout=link.try_seconds)
        return len(asked[topic].result().partitions)

    try:
        count: int = link.ask_again(ask)
    except KafkaException as error:
        if code_of(error) in MISSING:
            return None
        raise link.failure(error, f"looking for topic {topic}") from error
    return count


def settings_of(link: Link, topics: Iterable[str], *, seconds: float | None = None) -> dict[str, Mapping[str, str]]:
    """Return the settings of topics; raises the library's error where they may not be read."""
    resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in topics]
    if not resources:
        return {}

    def ask() -> dict[str, Mapping[str, str]]:
        patience = link.try_seconds if seconds is None else link.ask_seconds
        answers = link.admin().describe_configs(resources, request_timeout=patience)
        return {
            resource.name: {name: entry.value for name, entry in future.result().items()}
            for resource, future in answers.items()
        }

    settings: dict[str, Mapping[str, str]] = _ask_of_new(link, ask, seconds)
    return settings


def _ask_of_new(link: Link, question: Callable[[], Any], seconds: float | None) -> Any:
    """Ask for topics that one node has told of; the one that is asked now may hear of a new one a moment later."""
    deadline = time.monotonic() + KNOWN_SECONDS
    while True:
        try:
            return link.ask_again(question, seconds=seconds)
        except KafkaException as error:
            if code_of(error) not in MISSING or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _for_each(link: Link, doing: str, change: Callable[[], Mapping[str, Future[Any]]], *, good: Set[int]) -> None:
    """Ask for a change of things by their names, and again while what keeps it may pass: it may be done by then."""
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
        link.ask_again(ask, seconds=KNOWN_SECONDS)
    except KafkaException as error:
        raise link.failure(error, f"{doing} {failed}") from error


def log_ends(link: Link, partitions: Iterable[TopicPartition]) -> dict[tuple[str, int], int]:
    """Return the offset behind the last record of each partition, also of records that are not committed yet."""
    return _offsets(link, {each: OffsetSpec.latest() for each in partitions})


def log_starts(link: Link, partitions: Iterable[TopicPartition]) -> dict[tuple[str, int], int]:
    """Return the offset of the first record of each partition."""
    return _offsets(link, {each: OffsetSpec.earliest() for each in partitions})


def stable_ends(link: Link, partitions: Iterable[TopicPartition]) -> dict[tuple[str, int], int]:
    """Return the offset behind the last record that readers of committed records can see."""
    return _offsets(link, {each: OffsetSpec.latest() for each in partitions}, IsolationLevel.READ_COMMITTED)


def _offsets(
    link: Link,
    question: dict[TopicPartition, OffsetSpec],
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> dict[tuple[str, int], int]:
    if not question:
        return {}
    found: dict[tuple[str, int], int] = link.ask(
        lambda: {
            (each.topic, each.partition): future.result().offset
            for each, future in link.admin()
            .list_offsets(question, isolation_level=isolation, request_timeout=link.try_seconds)
            .items()
        },
        "asking for the ends of topics",
    )
    return found


def _find_wrong_settings(topic: Topic, have: Mapping[str, str]) -> Iterator[Finding]:
    for name in _MUST_HAVE:
        wanted = topic.settings.get(name)
        if wanted is None or _is_good(name, wanted, have.get(name, "")):
            continue
        yield Finding(
            text=f"topic {topic.name} has {name}={have.get(name)} and needs {wanted}, or messages that wait could be"
            f" lost or stuck; set it with kafka-configs, or delete the topic while nothing waits in it"
        )


def _is_good(name: str, wanted: str, have: str) -> bool:
    if name in ("retention.ms", "retention.bytes"):
        return have == "-1" or (wanted != "-1" and int(have) >= int(wanted))
    if name == "max.message.bytes":
        return int(have) >= int(wanted)
    return have == wanted


def _find_weak_replication(link: Link, topology: Topology) -> Iterator[Finding]:
    inbox = link.ask(
        lambda: (
            link.admin()
            .describe_topics(TopicCollection([topology.inbox]), request_timeout=link.try_seconds)[topology.inbox]
            .result()
        ),
        f"looking for topic {topology.inbox}",
    )
    replicas = min((len(partition.replicas) for partition in inbox.partitions), default=1)
    if replicas == 1:
        yield _advice("the ladder has one replica: a broker that is lost for good takes waiting messages with it")
        return
    try:
        in_sync = int(settings_of(link, [topology.inbox])[topology.inbox]["min.insync.replicas"])
    except KafkaException:
        return
    if in_sync < 2:
        yield _advice(
            f"min.insync.replicas is {in_sync} with {replicas} replicas: a confirmed message may be on one broker only;"
            " set it to 2 for topics that begin with delay.v1"
        )


def _advice(text: str) -> Finding:
    return Finding(text=text, is_problem=False)


def _is_of(topology: Topology, name: str) -> bool:
    own = {topic.name for topic in topology.topics()}
    return name in own or topology.hold_of(name) is not None


def _wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + KNOWN_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise ConfigurationError(f"{what}: not within {KNOWN_SECONDS:g} s; look at the broker's log")
        time.sleep(0.02)
