"""The loop that moves the messages of a ladder: read, decide, write, commit."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from airflow_delay_provider.brokers.base import Climber, OnDispatched
from airflow_delay_provider.brokers.kafka import administering, wire
from airflow_delay_provider.brokers.kafka.commands import Place
from airflow_delay_provider.brokers.kafka.destinations import Destinations
from airflow_delay_provider.brokers.kafka.flow import Flow
from airflow_delay_provider.brokers.kafka.isolation import Isolation, RecordFailedError, is_of_record
from airflow_delay_provider.brokers.kafka.lane import Lane, Record, Source
from airflow_delay_provider.brokers.kafka.link import is_unreached
from airflow_delay_provider.brokers.kafka.outlet import ChannelRefusedError, TransactionalOutlet, until_done
from airflow_delay_provider.brokers.kafka.progress import progress_of
from airflow_delay_provider.brokers.kafka.reading import BATCH, Partition, Reader
from airflow_delay_provider.brokers.kafka.stillness import Stillness
from airflow_delay_provider.brokers.kafka.trial import ANSWER_SECONDS, Trial
from airflow_delay_provider.brokers.kafka.trimming import Trimmer
from airflow_delay_provider.brokers.kafka.watch import Watch
from airflow_delay_provider.domain.clock import Clock, floor_ms

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.kafka.administering import LadderTopic
    from airflow_delay_provider.brokers.kafka.link import Link

log = logging.getLogger(__name__)

#: A dispatcher that is gone for so long loses its lanes to others, and its open transaction is undone.
GONE_SECONDS = 10
#: One that runs and does not go on for so long loses its lanes too.
STUCK_SECONDS = 60
#: How long a new dispatcher may have to wait for the transaction of one that was killed.
TAKE_OVER_SECONDS = 90.0
#: Steps of one lane between two looks at the others.
STEPS = 2000
#: The partitions may be another one's by now.
_LOST = {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.FENCED_INSTANCE_ID,
}
#: In place of headers whose names are no text.
UNREADABLE = "unreadable-headers"
#: Messages that are due within such a time are given out together.
TOGETHER_SECONDS = 0.005


class KafkaClimber(Climber):
    """Serves the lanes that the group gives it, any number of such side by side.

    Exactly once for readers of committed records: what lanes give out and which of their records are done is one
    transaction. It is bound to the membership in the group, so that one who has lost its lanes without knowing it can
    commit nothing any more. After any doubt, everything in memory is thrown away and read again from what is committed.
    """

    def __init__(
        self,
        link: Link,
        clock: Clock,
        *,
        instance: str | None = None,
        on_dispatched: OnDispatched | None = None,
    ) -> None:
        self._link = link
        self._topology = link.config.topology
        self._clock = clock
        self._instance = instance
        self._name = instance or str(uuid4())
        self._on_dispatched = on_dispatched
        self._watch: Watch | None = None
        self._trial: Trial | None = None
        self._destinations: Destinations | None = None
        #: The ladder as it was when it was opened.
        self._topics: Mapping[str, LadderTopic] = {}
        #: What is wrong with the numbers of its partitions.
        self._unequal: list[str] = []
        self._is_reading = False
        #: The lane that comes first.
        self._first = 0
        self._isolation = Isolation()
        self._stillness = Stillness()
        self._lanes: dict[int, Lane] = {}
        self._sources: dict[Partition, Source] = {}
        self._consumer: Consumer | None = None
        self._outlet: TransactionalOutlet | None = None
        self._flow: Flow | None = None
        #: In which the lanes were given; asked for later, it could be that of nobody, or a new one without these lanes.
        self._membership: Any = None
        self._trimmer = Trimmer(link)
        self._reader = Reader(link)

    # -- the loop ------------------------------------------------------------------------------------------------

    def run_once(self) -> float:
        """Wait for something to do, do it, and commit when it is time."""
        consumer, outlet, destinations = self._open()
        try:
            if self._is_ladder_changed():
                self._reopen()
                return 0.0
            self._is_reading = True
            self._read(consumer, self._pause(outlet))
            self._is_reading = False
            destinations.refresh()
            self._advance(outlet)
            if self._is_time_to_commit(outlet):
                self._commit(outlet)
        except KafkaException as error:
            self._isolation.note_failure(error)
            self._begin_anew(consumer, outlet, error)
        except RecordFailedError as error:
            self._isolation.note_defect(error)
            self._begin_anew(consumer, outlet, error)
        except Exception:
            self._give_up()
            raise
        if self._flow is not None:
            self._flow.regulate(self._sources, floor_ms(self._clock.now()))
        self._stillness.look(self._sources, floor_ms(self._clock.now()))
        self._trimmer.trim()
        return 0.0

    @property
    def trouble(self) -> str | None:
        """What a person should know although the climber goes on."""
        wrong = [*self._stillness.found, *self._unequal]
        return "; ".join(wrong[:3]) or None

    def close(self) -> None:
        """Commit what is begun and leave the group, so that others take over; a named one is waited for, 10 s."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            # Lanes are given back, and so committed, while the consumer leaves.
            self._link.close_consumer(consumer)
        # A broker that did not even let us end a transaction does not answer this either.
        if self._outlet is not None and not self._outlet.is_open:
            self._trimmer.trim(now=True)
        self._give_up()
        for helper in (self._watch, self._trial):
            if helper is not None:
                helper.close()
        self._watch = self._trial = self._destinations = None

    def _read(self, consumer: Consumer, wait: float) -> None:
        """Keep what is there, after waiting for the first record only.

        Lanes may come and go within each call. What a call returns then may be of before: it is read again.
        """
        first = consumer.poll(wait)
        if first is None:
            return
        self._keep(first)
        lanes = self._lanes
        records = consumer.consume(BATCH - 1, 0)
        if self._lanes is not lanes:
            self._load_lanes(consumer, consumer.assignment())
            return
        for record in records:
            self._keep(record)

    def _pause(self, outlet: TransactionalOutlet) -> float:
        """Return how long nothing has to be done."""
        turns = [turn for lane in self._lanes.values() if (turn := lane.next_turn_ms()) is not None]
        until_turn = (min(turns) - self._clock.now().timestamp() * 1000) / 1000 if turns else 1.0
        # What is written in an open transaction is seen when it ends: a few moments together cost less than each alone.
        least = TOGETHER_SECONDS if outlet.is_open and until_turn > 0 else 0.0
        return max(0.0, min(max(until_turn, least), outlet.seconds_left(), 0.1))

    def _keep(self, record: Message) -> None:
        error = record.error()
        if error is not None:
            raise self._link.failure(error, "reading the ladder")
        source = self._sources.get((record.topic(), record.partition()))
        if source is not None:
            source.waiting.append(
                Record(
                    record.offset(),
                    record.timestamp()[1],
                    record.key(),
                    record.value(),
                    _headers_of(record) if not source.hold_ms else None,
                )
            )

    def _advance(self, outlet: TransactionalOutlet) -> None:
        """Give out what is due in all lanes before more is taken in; each lane is the first one in turn."""
        lanes = [*self._lanes.values()]
        self._first = (self._first + 1) % max(1, len(lanes))
        lanes = lanes[self._first :] + lanes[: self._first]
        for step in (Lane.fire, Lane.take):
            for lane in lanes:
                self._do(step, lane, outlet)

    def _do(self, step: Callable[..., int], lane: Lane, outlet: TransactionalOutlet) -> None:
        isolation = self._isolation
        limit = isolation.steps_left if isolation.is_careful else STEPS
        try:
            isolation.count(step(lane, outlet, floor_ms(self._clock.now()), limit=limit), lane.in_hand)
        except KafkaException as error:
            if not is_of_record(error):
                raise
            raise RecordFailedError(lane.in_hand, error) from error
        except Exception as error:
            raise RecordFailedError(lane.in_hand, error) from error

    def _is_time_to_commit(self, outlet: TransactionalOutlet) -> bool:
        if outlet.is_open:
            return outlet.seconds_left() <= 0 or not self._isolation.steps_left
        return any(source.is_changed for source in self._sources.values())

    def _commit(self, outlet: TransactionalOutlet) -> None:
        progress = [
            (topic, lane.number, offset, note)
            for lane in self._lanes.values()
            for topic, offset, note in lane.progress()
        ]
        dispatched, lateness_ms = outlet.dispatched, outlet.lateness_ms
        outlet.commit(progress, self._membership)
        for lane in self._lanes.values():
            lane.committed()
        self._isolation.note_commit()
        self._trimmer.note((topic, lane, offset) for topic, lane, offset, _ in progress)
        if lateness_ms and self._on_dispatched is not None:
            self._on_dispatched(dispatched, lateness_ms)

    def _begin_anew(self, consumer: Consumer, outlet: TransactionalOutlet, error: Exception) -> None:
        """Undo what is not committed and read it again; what cannot be undone by us the broker undoes, for the next."""
        inner = error.args[0] if isinstance(error, KafkaException) else None
        text = str(error) if inner is None else inner.str()
        log.warning("%s: what is not committed is undone and done again: %s", self._link.config.name, text)
        try:
            # What can be gone on with was, for as long as it may take: a new producer is quicker than more of that. One
            # that reaches no node may never look for any again.
            is_lost = inner is not None and (inner.fatal() or inner.retriable() or is_unreached(error))
            if (is_lost and not isinstance(error, ChannelRefusedError)) or self._isolation.is_hopeless:
                raise error
            # Records that were on their way to us are not in memory, and the broker may have committed all the same.
            is_known = not (self._is_reading or outlet.is_committing or (inner is not None and inner.code() in _LOST))
            self._abort(outlet)
            if is_known and self._lanes:
                self._roll_back()
            else:
                self._load_lanes(consumer, consumer.assignment())
        except KafkaException as fatal:
            self._give_up()
            raise self._link.failure(fatal, "a transaction of the dispatcher") from fatal
        except Exception:
            self._give_up()
            raise

    def _abort(self, outlet: TransactionalOutlet) -> None:
        """Undo what is open, by a new producer of the same name where the broker knows of no transaction to be undone.

        So it is where a channel was deleted that the transaction began with. Once the new producer has begun, nothing
        of the one before can be committed any more; the partitions, and what is in memory of them, are still ours.
        """
        try:
            outlet.abort()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.INVALID_TXN_STATE or self._destinations is None:
                raise
            outlet.give_up()
            self._outlet = self._open_outlet(self._destinations)

    def _roll_back(self) -> None:
        """Go on from the last commit, where nothing since can be committed and the partitions are still ours."""
        for lane in self._lanes.values():
            lane.roll_back()
            for source in lane.sources.values():
                source.condemned.update(self._isolation.condemned(source.topic, lane.number))
        if self._watch is not None:
            # A channel may have caused it.
            self._watch.look_now()

    def _is_ladder_changed(self) -> bool:
        """Whether topics were added, deleted or created again, or have more partitions, since the ladder was opened."""
        seen = self._watch.ladder if self._watch is not None else None
        if seen is None or seen == self._topics:
            return False
        changed = sorted(name for name in seen.keys() | self._topics if seen.get(name) != self._topics.get(name))
        # What was seen before the ladder was completed says nothing.
        if self._watch is not None:
            self._watch.ladder = None
        if administering.ladder_topics(self._link) == self._topics:
            return False
        log.warning(
            "%s: the ladder has changed (%s): it is opened again", self._link.config.name, ", ".join(changed[:5])
        )
        return True

    def _reopen(self) -> None:
        """Commit what is done and begin like a new dispatcher, which knows of no record in topics that are new."""
        self._isolation = Isolation()
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            self._link.close_consumer(consumer)
        self._give_up()

    def _give_up(self) -> None:
        """Forget everything; the next run begins like a new dispatcher, and undoes what this one has left open."""
        consumer, self._consumer = self._consumer, None
        outlet, self._outlet = self._outlet, None
        self._flow = None
        self._drop_lanes()
        if outlet is not None:
            outlet.give_up()
        if consumer is not None:
            self._link.close_consumer(consumer)
        self._reader.close()

    # -- lanes come and go ---------------------------------------------------------------------------------------

    def _open(self) -> tuple[Consumer, TransactionalOutlet, Destinations]:
        if self._watch is None or self._trial is None or self._destinations is None:
            config = self._link.config
            self._watch, self._trial = Watch(config), Trial(self._open_trial_producer)
            compresses = str(config.client.get("compression.type", "none")) != "none"
            self._destinations = Destinations(self._watch, self._trial, compresses=compresses)
            self._watch.start()
        if self._consumer is None or self._outlet is None:
            self._topics = administering.complete(self._link)
            self._unequal = list(administering.find_unequal(self._topology, self._topics))
            administering.require_permitted(self._link, self._topology)
            rungs = [name for name in self._topics if self._topology.hold_of(name) is not None]
            self._outlet = self._open_outlet(self._destinations)
            self._consumer = self._open_consumer([self._topology.control, self._topology.inbox, *rungs])
            self._flow = Flow(self._consumer)
        return self._consumer, self._outlet, self._destinations

    def _open_outlet(self, destinations: Destinations) -> TransactionalOutlet:
        producer = self._link.make_producer(
            {
                "transactional.id": f"{self._topology.prefix}.{self._name}",
                "transaction.timeout.ms": GONE_SECONDS * 1000,
                "message.timeout.ms": GONE_SECONDS * 1000,
                # A transaction begins before the broker has quite ended the one before: ask again at once.
                "retry.backoff.ms": 5,
                "retry.backoff.max.ms": 500,
                "linger.ms": 5,
                "queue.buffering.max.messages": 500_000,
            }
        )
        # The library looks for a coordinator each half a second while no node is connected. The first answer names the
        # nodes, and the second one comes from one of them.
        for _ in range(2):
            self._link.ask(lambda: producer.list_topics(self._topology.journal, 5.0), "looking for the nodes")
        self._link.ask(lambda: producer.init_transactions(10.0), "beginning to dispatch", seconds=TAKE_OVER_SECONDS)
        return TransactionalOutlet(producer, self._topology, destinations)

    def _open_trial_producer(self) -> Producer:
        """Called in the thread of the trial."""
        producer = self._link.make_producer(
            {
                "transactional.id": f"{self._topology.prefix}.{self._name}.trial",
                "transaction.timeout.ms": GONE_SECONDS * 1000,
                "message.timeout.ms": round(ANSWER_SECONDS * 1000),
                "batch.num.messages": 1,
                "delivery.report.only.error": False,
                # What comes after one that is refused is not sent, so that it says nothing.
                "max.in.flight.requests.per.connection": 1,
                "linger.ms": 0,
                "retry.backoff.ms": 5,
            }
        )
        until_done(producer.init_transactions)
        return producer

    def _open_consumer(self, topics: Sequence[str]) -> Consumer:
        consumer = self._link.make_consumer(
            {
                "group.id": self._topology.dispatch_group,
                # Gives partition N of every topic to the same member, which makes it a lane.
                "partition.assignment.strategy": "range",
                "session.timeout.ms": GONE_SECONDS * 1000,
                # All others wait for one that does not answer when lanes are shared anew.
                "max.poll.interval.ms": STUCK_SECONDS * 1000,
                "heartbeat.interval.ms": 2000,
                "queued.min.messages": 5000,
                "queued.max.messages.kbytes": 65_536,
            }
            | ({"group.instance.id": self._instance} if self._instance else {})
        )
        consumer.subscribe(list(topics), on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)
        return consumer

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._membership = consumer.consumer_group_metadata()
        # Lost since then: without a member's name, the broker would take the commits of anybody.
        self._load_lanes(consumer, partitions if consumer.memberid() else [])
        log.info("%s: serving lanes %s", self._link.config.name, sorted(self._lanes) or "none")

    def _on_revoke(self, _consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        if self._outlet is not None and self._lanes:
            try:
                self._commit(self._outlet)
            except KafkaException as error:
                log.warning("%s: the last steps are undone: %s", self._link.config.name, error.args[0].str())
                self._undo(self._outlet)
        self._drop_lanes()

    def _on_lost(self, _consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        """Others have the lanes already: nothing of ours may be committed, not even under a new membership."""
        self._drop_lanes()
        if self._outlet is not None:
            self._undo(self._outlet)

    def _undo(self, outlet: TransactionalOutlet) -> None:
        """Undo what is not committed, while the group waits; what cannot be undone now is before the next step."""
        try:
            outlet.abort()
        except KafkaException as error:
            log.warning("%s: cannot undo the last steps yet: %s", self._link.config.name, error.args[0].str())

    def _drop_lanes(self) -> None:
        self._lanes, self._sources = {}, {}
        if self._destinations is not None:
            self._destinations.forget()
        if self._flow is not None:
            self._flow.forget()

    def _load_lanes(self, consumer: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """Build the lanes from what is committed, and read on from there."""
        self._drop_lanes()
        complete = administering.complete_lanes(self._topology, self._topics)
        places = [TopicPartition(each.topic, each.partition) for each in partitions if each.partition < complete]
        if not places:
            return
        committed = self._link.ask(
            lambda: consumer.committed(places, 10.0), "reading the progress", seconds=TAKE_OVER_SECONDS
        )
        starts, ends = administering.log_starts(self._link, places), administering.log_ends(self._link, places)
        recalled = self._read_recalls({each.partition for each in places})
        by_lane: dict[int, dict[str, Source]] = defaultdict(dict)
        for each in committed:
            known = self._topics.get(each.topic)
            topic_id = "" if known is None else known.id
            progress = progress_of(each, starts, ends=ends, topic_id=topic_id)
            source = Source(each.topic, self._topology.hold_of(each.topic) or 0, progress, topic_id=topic_id)
            by_lane[each.partition][each.topic] = self._sources[each.topic, each.partition] = source
            source.condemned.update(self._isolation.condemned(each.topic, each.partition))
            if each.offset >= 0 and progress.next < each.offset:
                self._note_created_again(source, each.partition, recalled[each.partition])
        self._lanes = {
            number: Lane(
                number,
                self._topology.ladder,
                sources,
                inbox=self._topology.inbox,
                control=self._topology.control,
                recalled=recalled[number],
            )
            for number, sources in sorted(by_lane.items())
        }
        consumer.assign(
            [TopicPartition(topic, number, source.progress.low) for (topic, number), source in self._sources.items()]
        )

    def _note_created_again(self, source: Source, lane: int, recalled: set[Place]) -> None:
        """Begin with the first record, and forget which records of the topic before it were recalled."""
        log.warning(
            "%s: topic %s was deleted and created again: partition %d is read from its beginning",
            self._link.config.name,
            source.topic,
            lane,
        )
        source.is_changed = True
        for place in [each for each in recalled if each.topic == source.topic]:
            recalled.discard(place)
            if self._outlet is not None:
                self._outlet.remember(place, recalled=False)

    def _read_recalls(self, lanes: set[int]) -> Mapping[int, set[Place]]:
        topic, found = self._topology.recalls, {lane: set[Place]() for lane in lanes}
        places = [TopicPartition(topic, lane) for lane in lanes]
        ends = administering.log_ends(self._link, places)
        starts = administering.log_starts(self._link, places)
        for record in self._reader.read_between(starts, ends):
            lane, key = record.partition(), record.key()
            if key is not None and (place := _place_of(key, lane)) is not None:
                change = found[lane].discard if record.value() is None else found[lane].add
                change(place)
        return found


def _place_of(key: bytes, lane: int) -> Place | None:
    try:
        return Place.from_key(key, lane)
    except ValueError:
        # Somebody else has written it.
        return None


def _headers_of(record: Message) -> wire.Headers | None:
    """Return the headers; names that are no text say nothing."""
    try:
        return record.headers() or None
    except UnicodeDecodeError:
        return [(UNREADABLE, b"")]
