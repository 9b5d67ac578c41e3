"""Random and mutated records in all topics of a ladder: `python -m tests.acceptance.kafka_fuzz`.

A canary is scheduled ten times a second by a raw client and must always arrive within a second of its due time. The
dispatcher must be the same process at the end, within its memory, and only messages that are not due yet may be left
of those written.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from airflow_delay_provider.brokers.kafka import header_protocol as protocol
from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.progress import progress_of
from airflow_delay_provider.brokers.kafka.reader import log_starts, stable_ends
from airflow_delay_provider.brokers.kafka.recall import Command, RecordPosition
from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message
from tests.acceptance.kafka_dispatcher import config_of
from tests.acceptance.kafka_soak import Dispatcher, now_ms, read_to_end
from tests.kafkas import fresh_topic, partitions_of, private_broker
from tools.servers.component import wait_for

PARTITIONS = 2
CANARY_SECONDS = 0.1
#: How late a canary may be.
LATE_MS = 1000
#: How long the ladder may take to become idle after the last record.
PATIENCE_SECONDS = 180.0
#: The growth above the memory at the start.
MEMORY_MB = 250
#: No message of the fuzz is due later than this, unless its time was mutated.
LONGEST_MS = 6_000


@dataclass(frozen=True, kw_only=True)
class Fuzz:
    """The settings of a run."""

    records: int
    seed: int = 0
    #: Records each second.
    rate: float = 1000
    #: How long only canaries run before the fuzz.
    control_seconds: float = 10
    tell: Callable[[str], None] = print


@dataclass(kw_only=True)
class Figures:
    """The results of a run."""

    written: dict[str, int] = field(default_factory=dict)
    #: Plain records of the inbox without an id of their own, by the id that they are given.
    places: set[str] = field(default_factory=set)
    due: dict[str, int] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    fuzz_from_ms: int = 0
    fuzz_to_ms: int = 0
    #: The longest that this process itself had to wait for the machine, alone and with the fuzz.
    stalls_ms: list[float] = field(default_factory=lambda: [0.0, 0.0])
    delivered: int = 0
    dead: int = 0
    waiting: int = 0
    waiting_ids: set[str] = field(default_factory=set)
    vanished: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    failures_reported: int = 0
    undone: int = 0
    was_restarted: bool = False
    seconds: float = 0.0

    def lateness_ms(self, *, fuzzed: bool) -> list[int]:
        """Of canaries that were due before the fuzz, or during it."""
        return sorted(
            self.seen.get(name, now_ms()) - due
            for name, due in self.due.items()
            if (due >= self.fuzz_from_ms) == fuzzed
        )

    @property
    def is_good(self) -> bool:
        late = self.lateness_ms(fuzzed=True)
        return not (
            self.vanished
            or self.stuck
            or self.was_restarted
            or self.failures_reported
            or self.due.keys() - self.seen.keys()
            or (late and late[-1] > LATE_MS)
            or self.rss_mb[-1] - self.rss_mb[0] > MEMORY_MB
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "good": self.is_good,
            "written": self.written,
            "delivered": self.delivered,
            "dead": self.dead,
            "not_due_yet": self.waiting,
            "vanished": len(self.vanished),
            "stuck": self.stuck[:5],
            "canary_ms": {
                "alone": _shares(self.lateness_ms(fuzzed=False)),
                "fuzz": _shares(self.lateness_ms(fuzzed=True)),
            },
            "canaries_lost": len(self.due.keys() - self.seen.keys()),
            "machine_stall_ms": {"alone": round(self.stalls_ms[0]), "fuzz": round(self.stalls_ms[1])},
            "rss_mb": {
                "before": round(self.rss_mb[0]),
                "most": round(max(self.rss_mb)),
                "after": round(self.rss_mb[-1]),
            },
            "dispatcher": {"restarted": self.was_restarted, "failed": self.failures_reported, "undone": self.undone},
            "seconds": round(self.seconds, 1),
        }


# -- records -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """A record of the fuzz."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()
    #: Whether it is a plain record without an id.
    is_plain: bool = False


class Mutator:
    """Makes records, decided by ``random`` alone."""

    def __init__(self, random: random.Random, topology: Topology, channels: Sequence[str]) -> None:
        self._random = random
        self._topology = topology
        self._channels = channels
        self._rungs = [topology.rung(hold_ms) for hold_ms in topology.ladder.holds_ms]
        self._bad_channels = (
            "__consumer_offsets",
            "__transaction_state",
            topology.inbox,
            topology.dead,
            topology.rung(2_000),
            "no such topic",
            "a\0b",
            "x" * 300,
            "",
            "..",
        )

    def record(self) -> Written:
        """Return the next one."""
        makers = (self._plain, self._plain, self._envelope, self._envelope, self._command, self._noise)
        return self._random.choice(makers)()

    def _noise(self) -> Written:
        random, topology = self._random, self._topology
        topic = random.choice([topology.inbox, topology.control, random.choice(self._rungs)])
        key = random.choice([None, b"", self._bytes(12), self._bytes(40), b"\xff" * 9])
        value = random.choice([None, b"", self._bytes(60), self._bytes(2_000), b"\x01" + self._bytes(80)])
        headers = [(self._text(), self._bytes(20)) for _ in range(random.choice((0, 0, 1, 3)))]
        return Written(topic, key, value, headers)

    def _plain(self) -> Written:
        """A request of a plain producer, with nonsense in some of its headers."""
        random = self._random
        headers: dict[str, bytes | None] = {
            protocol.CHANNEL: self._channel().encode(errors="replace"),
            random.choice((protocol.DELIVER_AT, protocol.DELIVER_AFTER_MS)): self._time(),
        }
        if random.random() < 0.3:
            headers[
                random.choice(
                    (
                        protocol.KEY,
                        protocol.PRIORITY,
                        protocol.HANDLED_COUNT,
                        protocol.ORIGIN,
                        protocol.CONTENT_TYPE,
                    )
                )
            ] = random.choice([None, b"", b"9", b"-1", b"9" * 30, b"[1,2,3,4]", b"{", self._bytes(300)])
        is_plain = random.random() < 0.7
        if not is_plain:
            headers[protocol.ID] = random.choice([uuid4().hex.encode(), self._bytes(30), b"x" * 300, b""])
        if random.random() < 0.2:
            headers[self._text()] = self._bytes(50)
        if random.random() < 0.02:
            headers["large"] = bytes(random.choice((200_000, 2_000_000)))
        key = random.choice([None, b"k%d" % random.randrange(50), self._bytes(20)])
        value = random.choice([b"", None, self._bytes(100), self._bytes(3_000)])
        return Written(self._topology.inbox, key, value, list(headers.items()), is_plain)

    def _envelope(self) -> Written:
        """An envelope of this package, as it is or damaged, anywhere."""
        random = self._random
        due_ms = self._due_ms()
        message_id = random.choice([uuid4().hex, "x" * 255])
        message = Message(
            id=message_id,
            channel=random.choice(self._channels),
            payload=self._bytes(200),
            deliver_at=from_ms(due_ms),
            key=random.choice([None, "k", "ü"]),
            headers=random.choice([{}, {"a": "b"}, {"ü": "ö" * 50}]),
        )
        key, value = wire.encode_key(due_ms, message_id), wire.encode_envelope(message, now_ms=now_ms())
        topic = random.choice([self._topology.inbox, random.choice(self._rungs), random.choice(self._rungs[:6])])
        return Written(topic, self._damaged(key), self._damaged(value))

    def _command(self) -> Written:
        random, topology = self._random, self._topology
        position = RecordPosition(
            topic=random.choice([topology.inbox, random.choice(self._rungs), "elsewhere", topology.control]),
            partition=random.choice([0, 1, 2, -1, 10**6, 10**20]),
            # Never one of a canary.
            offset=random.choice([-1, 10**9 + random.randrange(10**6), 10**30]),
        )
        envelope = self._envelope().value or b""
        command = Command(
            id=random.choice([uuid4().hex, "x" * 70_000, ""]),
            change=random.choice(list(Change)),
            message_id=random.choice([uuid4().hex, "x" * 70_000]),
            channel=random.choice([*self._channels, *self._bad_channels]),
            position=position,
            deliver_at_ms=random.choice([self._due_ms(), -1, 2**62, 10**30]),
            envelope=random.choice([b"", envelope]),
        )
        return Written(topology.control, b"k", self._damaged(command.encode()))

    def _damaged(self, value: bytes) -> bytes:
        """Return it as it is, or with some bytes changed, cut or doubled."""
        random = self._random
        if not value or random.random() < 0.3:
            return value
        what = random.random()
        if what < 0.2:
            return value[: random.randrange(len(value))]
        if what < 0.3:
            return value + self._bytes(30)
        damaged = bytearray(value)
        for _ in range(random.choice((1, 1, 2, 8))):
            damaged[random.randrange(len(damaged))] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
        return bytes(damaged)

    def _due_ms(self) -> int:
        return now_ms() + self._random.randrange(-2_000, LONGEST_MS)

    def _time(self) -> bytes:
        random = self._random
        due_ms = self._due_ms()
        good = [b"%d" % due_ms, from_ms(due_ms).isoformat().encode(), b"%d" % random.randrange(LONGEST_MS)]
        bad = [b"", b"soon", b"-5", b"1e9", b"9" * 40, b"\xff", b"0x10", b"2020-01-01", "٣".encode(), b"nan"]
        return random.choice(good if random.random() < 0.7 else bad)

    def _channel(self) -> str:
        random = self._random
        return random.choice(
            self._channels if random.random() < 0.7 else [*self._bad_channels, f"no-{uuid4().hex[:6]}"]
        )

    def _bytes(self, most: int) -> bytes:
        return self._random.randbytes(self._random.randrange(most))

    def _text(self) -> str:
        return "".join(
            chr(self._random.choice((65, 0xE9, 0x4E00, 0x1F600, 9, 45))) for _ in range(self._random.randrange(1, 8))
        )


# -- the run -------------------------------------------------------------------------------------------------------


class Canaries:
    """Scheduled by one raw client and read by another, in threads of their own."""

    def __init__(self, bootstrap: str, inbox: str, channel: str, figures: Figures) -> None:
        self._bootstrap = bootstrap
        self._inbox = inbox
        self._channel = channel
        self._figures = figures
        self._end = threading.Event()
        self._read_on = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._send, self._read, self._doze)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Send no more, and read until all have arrived or it takes too long."""
        self._end.set()
        self._threads[0].join(30)
        deadline = time.monotonic() + 30
        while self._figures.due.keys() - self._figures.seen.keys() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._read_on.set()
        self._threads[1].join(30)

    def _send(self) -> None:
        source, number = random.Random(0), 0
        with Producer({"bootstrap.servers": self._bootstrap, "linger.ms": 0, "enable.idempotence": True}) as producer:
            started = time.monotonic()
            while not self._end.is_set():
                name, due_ms = f"canary-{number}", now_ms() + source.randrange(500, 5_000)
                headers = {
                    protocol.CHANNEL: self._channel,
                    protocol.DELIVER_AT: str(due_ms),
                    protocol.ID: name,
                }
                self._figures.due[name] = due_ms
                producer.produce(self._inbox, b"x", partition=number % PARTITIONS, headers=headers)
                producer.poll(0)
                number += 1
                self._end.wait(max(0.0, started + CANARY_SECONDS * number - time.monotonic()))
            producer.flush(30)

    def _read(self) -> None:
        settings = {"group.id": uuid4().hex, "enable.auto.commit": False, "fetch.wait.max.ms": 20}
        with Consumer({"bootstrap.servers": self._bootstrap, "auto.offset.reset": "earliest"} | settings) as consumer:
            consumer.assign([TopicPartition(self._channel, each, 0) for each in partitions_of(consumer, self._channel)])
            while not self._read_on.is_set():
                for record in consumer.consume(100, 0.02):
                    if record.error() is None:
                        name = dict(record.headers() or [])[protocol.ID].decode()
                        self._figures.seen.setdefault(name, now_ms())

    def _doze(self) -> None:
        """Measure how long the machine keeps a runnable thread waiting."""
        while not self._read_on.is_set():
            before = time.monotonic()
            time.sleep(0.01)
            stall_ms = (time.monotonic() - before) * 1000 - 10
            which = int(bool(self._figures.fuzz_from_ms))
            self._figures.stalls_ms[which] = max(self._figures.stalls_ms[which], stall_ms)


def fuzz(work: Fuzz, bootstrap: str, run_dir: Path) -> Figures:
    """Run the fuzz on a ladder of its own; the log of the dispatcher stays in ``run_dir``."""
    figures, started = Figures(), time.monotonic()
    settings = {"ladder": f"fuzz-{uuid4().hex[:8]}", "partitions": PARTITIONS}
    given = {"bootstrap": bootstrap, "settings": settings}
    canary_channel = fresh_topic(bootstrap, message_timestamp_type="LogAppendTime")
    channels = [
        fresh_topic(bootstrap, 2),
        fresh_topic(bootstrap, cleanup_policy="compact"),
        fresh_topic(bootstrap, max_message_bytes=3_000),
        fresh_topic(bootstrap, message_timestamp_before_max_ms=0),
    ]
    with KafkaBroker(config_of(given)) as client:
        client.create_topology()
        dispatcher = Dispatcher(given, run_dir)
        try:
            wait_for(lambda: len(dispatcher.partitions()) == PARTITIONS, what="the dispatcher serves", seconds=120)
            pid = dispatcher.process.pid
            canaries = Canaries(bootstrap, client.topology.inbox, canary_channel, figures)
            canaries.start()
            time.sleep(work.control_seconds)
            figures.rss_mb.append(dispatcher.rss_mb())
            figures.fuzz_from_ms = now_ms()
            _write(work, bootstrap, Mutator(random.Random(work.seed), client.topology, channels), figures, dispatcher)
            figures.fuzz_to_ms = now_ms()
            work.tell("all written")
            time.sleep(LONGEST_MS / 1000)
            canaries.stop()
            wait_for(lambda: _look(client, figures), what="everything is done", seconds=PATIENCE_SECONDS, interval=1)
            figures.rss_mb.append(dispatcher.rss_mb())
            figures.was_restarted = not dispatcher.is_running() or dispatcher.process.pid != pid
            _judge(bootstrap, client, channels, figures)
        except TimeoutError:
            figures.rss_mb.append(dispatcher.rss_mb())
        finally:
            said = dispatcher.log.read_text(errors="replace")
            dispatcher.stop()
        figures.failures_reported = said.count(" WARNING failed")
        figures.undone = said.count("is aborted and repeated")
        client.delete_topology(even_if_messages_wait=True)
    figures.seconds = time.monotonic() - started
    return figures


def _write(work: Fuzz, bootstrap: str, mutator: Mutator, figures: Figures, dispatcher: Dispatcher) -> None:
    source, started = random.Random(work.seed + 1), time.monotonic()

    def note(error: KafkaError | None, record: Any) -> None:
        if error is None:
            figures.places.add(f"{record.topic()}-{record.partition()}-{record.offset()}")

    settings = {"compression.type": "lz4", "message.max.bytes": 50_000_000, "linger.ms": 5, "log_level": 0}
    with Producer({"bootstrap.servers": bootstrap, **settings}) as producer:
        for number in range(work.records):
            record = mutator.record()
            kind = record.topic.rpartition(".")[2] if "rung" not in record.topic else "rung"
            figures.written[kind] = figures.written.get(kind, 0) + 1
            options: dict[str, Any] = {"headers": list(record.headers), "partition": source.randrange(PARTITIONS)}
            if record.is_plain:
                options["on_delivery"] = note
            while True:
                try:
                    producer.produce(record.topic, record.value, record.key, **options)
                except BufferError:
                    producer.poll(0.05)
                else:
                    break
            producer.poll(0)
            if number % 1000 == 0:
                figures.rss_mb.append(dispatcher.rss_mb())
            time.sleep(max(0.0, started + number / work.rate - time.monotonic()))
        producer.flush(60)


def _look(client: KafkaBroker, figures: Figures) -> bool:
    """Whether only messages that are not due yet are left, by committed offsets and their notes."""
    topology, clients = client.topology, client._clients
    topics = [topology.inbox, topology.control, *(topology.rung(hold_ms) for hold_ms in topology.ladder.holds_ms)]
    places = [TopicPartition(topic, partition) for topic in topics for partition in range(PARTITIONS)]
    settings = {"group.id": topology.dispatch_group, "enable.auto.commit": False, "auto.offset.reset": "earliest"}
    with Consumer({"bootstrap.servers": client.config.client["bootstrap.servers"], **settings}) as reader:
        starts, ends = log_starts(clients, places), stable_ends(clients, places)
        progress = {(each.topic, each.partition): progress_of(each, starts) for each in reader.committed(places, 30)}
    figures.stuck, figures.waiting = [], 0
    starts = {where: known.low for where, known in progress.items()}
    for record in client._recaller._reader.read_between(starts, ends):
        where = (record.topic(), record.partition())
        if not progress[where].is_waiting(record.offset()):
            continue
        hold_ms = topology.hold_of(record.topic())
        is_message = hold_ms is not None and len(record.key() or b"") > 8
        if is_message and now_ms() + LONGEST_MS < wire.held_until_ms(record.key()) <= protocol.MAX_MS:
            figures.waiting += 1
            figures.waiting_ids.add(record.key()[8:].decode(errors="replace"))
            continue
        # It was written to this rung, so it waits as long as the others there.
        if hold_ms is not None and hold_ms > LONGEST_MS and record.timestamp()[1] + hold_ms > now_ms():
            figures.waiting += 1
            continue
        figures.stuck.append(f"{record.topic()}/{record.partition()}/{record.offset()}")
    return not figures.stuck


def _judge(bootstrap: str, client: KafkaBroker, channels: Sequence[str], figures: Figures) -> None:
    """Find every plain record again: in a channel, in the dead-letter topic, or in a rung."""
    found = set(figures.waiting_ids)
    for record in read_to_end(bootstrap, channels):
        figures.delivered += 1
        found.add(_header(record, protocol.ID))
    for record in read_to_end(bootstrap, [client.topology.dead]):
        figures.dead += 1
        found |= {_header(record, protocol.ID), _header(record, protocol.SOURCE).replace("/", "-")}
    figures.vanished = sorted(figures.places - found)


def _header(record: Any, name: str) -> str:
    return (dict(record.headers() or []).get(name) or b"").decode(errors="replace")


def _shares(ascending: list[int]) -> dict[str, int] | None:
    if not ascending:
        return None
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {"n": len(ascending)} | {
        name: ascending[min(len(ascending) - 1, int(share * len(ascending)))] for name, share in shares.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bootstrap", help="a broker that is there already; a private one otherwise")
    parser.add_argument("--keep", type=Path, help="a folder for what dispatcher and broker say")
    args = parser.parse_args()
    work = Fuzz(
        records=args.records,
        seed=args.seed,
        rate=args.rate,
        tell=lambda text: print(f"{time.strftime('%X')} {text}", file=sys.stderr, flush=True),
    )
    with tempfile.TemporaryDirectory(prefix="delay-fuzz-") as folder:
        run_dir = args.keep or Path(folder)
        run_dir.mkdir(parents=True, exist_ok=True)
        if args.bootstrap:
            figures = fuzz(work, args.bootstrap, run_dir)
        else:
            with private_broker(run_dir) as broker:
                figures = fuzz(work, broker.bootstrap, run_dir)
    print(json.dumps({"seed": args.seed, "records": args.records} | figures.as_dict()))
    sys.exit(0 if figures.is_good else 1)


if __name__ == "__main__":
    main()
