"""Messages wait on a Kafka whose dispatchers are killed again and again: `python -m tests.acceptance.kafka_soak`.

One to three dispatchers run as processes of their own: they are killed and replaced, others join and leave, and the
broker itself is killed and started again on its data. At the end every id must be in its topic exactly once and not
before its time, the journal must agree, and the ladder must be empty.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

import psutil
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.domain import message as domain
from airflow_delay_provider.domain.clock import ceil_ms
from airflow_delay_provider.domain.exceptions import BrokerError, MessagesWaitError
from airflow_delay_provider.domain.lifecycle import FROM_THE_START
from tests.acceptance.kafka_dispatcher import config_of
from tests.kafkas import fresh_topic, partitions_of, private_broker
from tools.servers.component import wait_for
from tools.servers.kafka import KafkaCluster
from tools.servers.process import dies_with_parent

BATCH = 500
#: Undisturbed are messages that are due so long after the last disturbance has ended: its backlog is worked off then.
SETTLE_MS = 10_000
#: How long after its due time the last message may come: stuck dispatchers have lost their partitions by then, and
#: their open transactions are aborted. A message that comes later counts as lost.
PATIENCE_SECONDS = 240
#: How many log lines of each dispatcher that ran to the end are shown after a failure.
LAST_LINES = 25
SERVING = re.compile(r"^([0-9.]+) INFO .*: serving partitions \[([0-9, ]*)\]$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Soak:
    """The settings of a run."""

    messages: int
    #: How long everything is disturbed. Messages are scheduled in the first half of it.
    seconds: float = 120
    longest: float = 120
    kills: int = 20
    broker_kills: int = 1
    #: How often another dispatcher joins or one leaves.
    turns: int = 10
    partitions: int = 4
    channels: int = 3
    channel_partitions: int = 3
    #: Dispatchers with names of their own continue at once after a restart.
    named: int = 1
    most: int = 3
    seed: int = 0
    tell: Callable[[str], None] = print


@dataclass(kw_only=True)
class Figures:
    """The results of a run; all times are milliseconds since 1970, or between two."""

    #: Id to due time.
    due: dict[str, int] = field(default_factory=dict)
    uncertain: set[str] = field(default_factory=set)
    #: When records of each id were stored, as often as they were.
    stored: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    #: When each id was first seen by a reader of committed records.
    seen: dict[str, int] = field(default_factory=dict)
    early: list[str] = field(default_factory=list)
    #: When records of each partition were stored, in order.
    by_partition: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    #: Each disturbance and its time, and for a kill the partitions that were served.
    disturbances: list[tuple[int, str, tuple[int, ...]]] = field(default_factory=list)
    broker_down: list[tuple[int, int]] = field(default_factory=list)
    rss_mb: dict[int, float] = field(default_factory=dict)
    takeovers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    #: Failures that dispatchers reported and continued from.
    errors_reported: int = 0
    still_waiting: str | None = None
    dead: int = 0
    wrong_in_journal: list[str] = field(default_factory=list)
    failed_to_stop: int = 0
    #: The last log lines of each dispatcher that ran to the end.
    last_words: list[str] = field(default_factory=list)
    seconds: float = 0

    @property
    def lost(self) -> list[str]:
        return sorted(self.due.keys() - self.stored.keys())

    @property
    def duplicates(self) -> list[str]:
        return sorted(name for name, at in self.stored.items() if len(at) > 1 and name not in self.uncertain)

    @property
    def strange(self) -> list[str]:
        """Ids that were never scheduled."""
        return sorted(self.stored.keys() - self.due.keys())

    @property
    def is_good(self) -> bool:
        return not (
            self.lost
            or self.duplicates
            or self.strange
            or self.early
            or self.still_waiting
            or self.dead
            or self.wrong_in_journal
            or self.failed_to_stop
        )

    def lateness_ms(self, of: dict[str, int], *, undisturbed: bool) -> list[int]:
        calm = max((at for at, _, _ in self.disturbances), default=0)
        calm = max([calm, *(up for _, up in self.broker_down)])
        over = max([calm, *(at + takes for at, takes in self._takeover_ends())])
        first = over + SETTLE_MS if undisturbed else 0
        return sorted(at - self.due[name] for name, at in of.items() if name in self.due and self.due[name] >= first)

    def _takeover_ends(self) -> Iterator[tuple[int, int]]:
        for at, what, partitions in self.disturbances:
            if partitions and (takes := self.takeover_ms(at, partitions)) is not None and what.startswith("kill"):
                yield at, takes

    def takeover_ms(self, at: int, partitions: Sequence[int]) -> int | None:
        """Return how long after a kill all of these partitions delivered again; None if one had no more messages."""
        firsts = [
            next((stored for stored in self.by_partition[partition] if stored > at), None) for partition in partitions
        ]
        known = [first for first in firsts if first is not None]
        return max(known) - at if len(known) == len(firsts) and known else None

    def as_dict(self) -> dict[str, Any]:
        first_of = {name: at[0] for name, at in self.stored.items()}
        counts = Counter(what.split(" ")[0] for _, what, _ in self.disturbances)
        return {
            "messages": len(self.due),
            "lost": len(self.lost),
            "duplicates": len(self.duplicates),
            "early": len(self.early),
            "strange": len(self.strange),
            "uncertain": len(self.uncertain),
            "still_waiting": self.still_waiting,
            "dead": self.dead,
            "wrong_in_journal": len(self.wrong_in_journal),
            "failed_to_stop": self.failed_to_stop,
            "disturbances": dict(counts),
            "broker_down_s": [round((up - down) / 1000, 1) for down, up in self.broker_down],
            "takeover_s": {
                what: {"n": len(each), "p50": _share(each, 0.5), "max": _share(each, 1.0)}
                for what, each in self.takeovers.items()
            },
            "lateness_ms": _percentiles(self.lateness_ms(first_of, undisturbed=False)),
            "lateness_undisturbed_ms": _percentiles(self.lateness_ms(first_of, undisturbed=True)),
            "visible_undisturbed_ms": _percentiles(self.lateness_ms(self.seen, undisturbed=True)),
            "peak_rss_mb": round(max(self.rss_mb.values(), default=0)),
            "errors_reported": self.errors_reported,
            "seconds": round(self.seconds, 1),
            "samples": {
                "lost": self.lost[:5],
                "duplicates": self.duplicates[:5],
                "early": self.early[:5],
                "wrong_in_journal": self.wrong_in_journal[:5],
            },
        }

    def __str__(self) -> str:
        return json.dumps(self.as_dict())


# -- dispatchers ---------------------------------------------------------------------------------------------------


class Dispatcher:
    """One process with a log file."""

    def __init__(
        self, given: dict[str, Any], folder: Path, instance: str | None = None, after: Path | None = None
    ) -> None:
        """Start it.

        :param after: the file that it waits for before it begins; how long a program takes to start says nothing of it.
        """
        self.instance = instance
        self.log = folder / f"dispatcher-{uuid4().hex[:8]}.log"
        command = [sys.executable, "-m", "tests.acceptance.kafka_dispatcher", json.dumps(given)]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    *command,
                    *(("--instance", instance) if instance else ()),
                    *(("--after", str(after)) if after else ()),
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=dies_with_parent(signal.SIGKILL),
            )

    @property
    def kind(self) -> str:
        return "named" if self.instance else "unnamed"

    def is_running(self) -> bool:
        return self.process.poll() is None

    def is_ready(self) -> bool:
        """Whether it waits for its file."""
        return " INFO ready" in self.log.read_text(errors="replace")

    def partitions(self) -> tuple[int, ...]:
        """The partitions that it was given last."""
        found = SERVING.findall(self.log.read_text(errors="replace"))
        return tuple(int(partition) for partition in found[-1][1].split(",")) if found and found[-1][1] else ()

    def rss_mb(self) -> float:
        with suppress(psutil.Error):
            return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20
        return 0.0

    def cpu_seconds(self) -> float:
        """How long it has worked so far, however little of a busy machine it was given."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, seconds: float = 60) -> bool:
        """Ask it to end and return whether it did; one that has hardly begun ends by the signal itself."""
        self.process.terminate()
        try:
            return self.process.wait(seconds) in (0, -signal.SIGTERM)
        except subprocess.TimeoutExpired:
            # It writes its stack.
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
            self.kill()
            return False

    def last_words(self) -> str:
        said = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join([f"-- {self.kind} dispatcher", *said])


class Crew:
    """The running dispatchers."""

    def __init__(self, work: Soak, given: dict[str, Any], folder: Path, figures: Figures) -> None:
        self._work = work
        self._given = given
        self._folder = folder
        self._figures = figures
        self.all: list[Dispatcher] = []
        self.running: list[Dispatcher] = []

    def start(self, instance: str | None = None) -> Dispatcher:
        dispatcher = Dispatcher(self._given, self._folder, instance)
        self.all.append(dispatcher)
        self.running.append(dispatcher)
        return dispatcher

    def start_first(self) -> None:
        for number in range(self._work.named):
            self.start(f"dispatcher-{number}")
        if not self._work.named:
            self.start()

    def kill_and_replace(self, victim: Dispatcher) -> None:
        partitions = victim.partitions()
        at = now_ms()
        victim.kill()
        self.running.remove(victim)
        self._figures.disturbances.append((at, f"kill {victim.kind}", partitions))
        self._work.tell(f"killed {victim.kind}, which served partitions {list(partitions)}")
        self.start(victim.instance)

    def join_or_leave(self, source: random.Random) -> None:
        unnamed = [each for each in self.running if each.instance is None]
        leaves = len(self.running) >= self._work.most or (unnamed and source.random() < 0.5)
        if leaves and unnamed and len(self.running) > 1:
            leaving = source.choice(unnamed)
            self.running.remove(leaving)
            self._figures.disturbances.append((now_ms(), "leave", ()))
            self._work.tell("one leaves")
            self._figures.failed_to_stop += not leaving.stop()
        else:
            self._figures.disturbances.append((now_ms(), "join", ()))
            self._work.tell("one joins")
            self.start()

    def note_memory(self) -> None:
        for each in list(self.running):
            pid = each.process.pid
            self._figures.rss_mb[pid] = max(self._figures.rss_mb.get(pid, 0.0), each.rss_mb())

    def require_alive(self) -> None:
        for each in list(self.running):
            if not each.is_running() and each in self.running:
                raise AssertionError(f"a dispatcher ended by itself; see {each.log}")

    def stop_all(self) -> None:
        for each in list(self.running):
            self._figures.failed_to_stop += not each.stop()
            self._figures.last_words.append(each.last_words())
        self.running.clear()
        self._figures.errors_reported = sum(
            each.log.read_text(errors="replace").count(" WARNING failed") for each in self.all
        )

    def kill_all(self) -> None:
        for each in self.all:
            if each.is_running():
                each.kill()


# -- the run -------------------------------------------------------------------------------------------------------


def soak(work: Soak, run_dir: Path) -> Figures:
    """Run the soak on a private broker; the logs of dispatchers stay in ``run_dir``."""
    with private_broker(run_dir) as broker:
        return _soak(work, broker, run_dir)


def _soak(work: Soak, broker: KafkaCluster, run_dir: Path) -> Figures:
    figures, started = Figures(), time.monotonic()
    channels = [
        fresh_topic(broker.bootstrap, partitions=work.channel_partitions, message_timestamp_type="LogAppendTime")
        for _ in range(work.channels)
    ]
    settings = {"ladder": f"soak-{uuid4().hex[:8]}", "partitions": work.partitions, "confirm_timeout": 20}
    given = {"bootstrap": broker.bootstrap, "settings": settings}
    crew = Crew(work, given, run_dir, figures)
    # Nothing is scheduled while the broker is down: a message scheduled twice would be no duplicate of the ladder.
    publishing = threading.Lock()
    watcher = Watcher(broker.bootstrap, channels, figures, crew)
    try:
        with KafkaBroker(config_of(given)) as client, ThreadPoolExecutor(1) as pool:
            client.create_topology(channels)
            crew.start_first()
            wait_for(lambda: crew.running[0].partitions(), what="the first dispatcher serves", seconds=120)
            watcher.start()
            scheduling = pool.submit(_schedule_all, work, client, channels, publishing, figures)
            # Not in a thread: processes that one has started end with it.
            _disturb(work, broker, crew, publishing, figures)
            scheduling.result()
            _wait_for_all(work, crew, figures)
            crew.stop_all()
            watcher.stop()
            work.tell("all stopped")
            _judge(work, broker, client, channels, figures)
    finally:
        watcher.stop()
        crew.kill_all()
    figures.seconds = time.monotonic() - started
    return figures


def _schedule_all(
    work: Soak, client: KafkaBroker, channels: Sequence[str], publishing: threading.Lock, figures: Figures
) -> None:
    source, started = random.Random(work.seed), time.monotonic()
    for first in range(0, work.messages, BATCH):
        time.sleep(max(0.0, started + work.seconds / 2 * first / work.messages - time.monotonic()))
        with publishing:
            now = datetime.now(UTC)
            batch = [
                domain.Message(
                    id=f"m{number}",
                    channel=source.choice(channels),
                    payload=b"%d" % number,
                    deliver_at=now + timedelta(seconds=source.uniform(0, work.longest)),
                )
                for number in range(first, min(first + BATCH, work.messages))
            ]
            figures.due |= {message.id: ceil_ms(message.deliver_at) for message in batch}
            _schedule_until_confirmed(client, batch, figures)
    work.tell("all scheduled")


def _schedule_until_confirmed(client: KafkaBroker, batch: Sequence[domain.Message], figures: Figures) -> None:
    waiting = list(batch)
    while waiting:
        try:
            client.schedule(waiting)
        except BrokerError as error:
            unconfirmed = set(error.unconfirmed)
            if not error.may_pass or not unconfirmed or not unconfirmed <= {message.id for message in waiting}:
                raise
            figures.uncertain |= unconfirmed
            waiting = [message for message in waiting if message.id in unconfirmed]
        else:
            return


def _disturb(work: Soak, broker: KafkaCluster, crew: Crew, publishing: threading.Lock, figures: Figures) -> None:
    """Cause all disturbances, spread over the time."""
    source, started = random.Random(work.seed + 1), time.monotonic()

    def spread(count: int, what: str) -> list[tuple[float, str]]:
        return [(work.seconds * (n + source.random()) / count, what) for n in range(count)]

    plan = sorted([*spread(work.kills, "kill"), *spread(work.turns, "turn"), *spread(work.broker_kills, "broker")])
    for moment, what in plan:
        time.sleep(max(0.0, started + moment - time.monotonic()))
        if what == "kill":
            crew.kill_and_replace(source.choice(crew.running))
        elif what == "turn":
            crew.join_or_leave(source)
        else:
            with publishing:
                down = now_ms()
                figures.disturbances.append((down, "broker", ()))
                broker.kill()
                time.sleep(source.uniform(0, 5))
                broker.start_again()
                figures.broker_down.append((down, now_ms()))
                started += (now_ms() - down) / 1000
            work.tell(f"broker killed; up again after {(now_ms() - down) / 1000:.1f} s")


def _wait_for_all(work: Soak, crew: Crew, figures: Figures) -> None:
    last = max(figures.due.values())
    deadline = time.monotonic() + max(0.0, (last - now_ms()) / 1000) + PATIENCE_SECONDS
    while len(figures.seen) < len(figures.due) and time.monotonic() < deadline:
        crew.require_alive()
        time.sleep(0.2)
    work.tell(f"{len(figures.seen)} of {len(figures.due)} seen")


class Watcher:
    """Reads the channels continuously to see when messages become visible, and samples the memory of dispatchers."""

    def __init__(self, bootstrap: str, channels: Sequence[str], figures: Figures, crew: Crew) -> None:
        self._bootstrap = bootstrap
        self._channels = channels
        self._figures = figures
        self._crew = crew
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(30)

    def _run(self) -> None:
        next_look = time.monotonic()
        with _reader(self._bootstrap) as consumer:
            consumer.assign(_all_of(consumer, self._channels))
            while not self._end.is_set():
                for record in consumer.consume(1000, 0.02):
                    if record.error() is None:
                        self._figures.seen.setdefault(id_of(record), now_ms())
                if time.monotonic() > next_look:
                    next_look = time.monotonic() + 0.5
                    self._crew.note_memory()


# -- checks --------------------------------------------------------------------------------------------------------


def _judge(work: Soak, broker: KafkaCluster, client: KafkaBroker, channels: Sequence[str], figures: Figures) -> None:
    topology = client.topology
    for record in read_to_end(broker.bootstrap, channels):
        name, at = id_of(record), record.timestamp()[1]
        figures.stored[name].append(at)
        figures.by_partition[topology.partition_of(None, name)].append(at)
        if at < figures.due.get(name, 0):
            figures.early.append(name)
    for stored in figures.by_partition.values():
        stored.sort()
    for at, what, partitions in figures.disturbances:
        if partitions and (takes := figures.takeover_ms(at, partitions)) is not None:
            figures.takeovers[what].append(takes)
    figures.dead = len(list(read_to_end(broker.bootstrap, [topology.dead])))
    figures.wrong_in_journal = wrong_in_journal(client, figures)
    wait_for(lambda: _is_deleted(client, figures), what="the ladder is deleted", seconds=90)


def _is_deleted(client: KafkaBroker, figures: Figures) -> bool:
    try:
        client.delete_topology()
    except MessagesWaitError as error:
        # A named dispatcher stays a member for a while, in case it restarts.
        if "dispatchers serve" in str(error):
            return False
        figures.still_waiting = str(error)
    return True


def wrong_in_journal(client: KafkaBroker, figures: Figures) -> list[str]:
    """Return the ids that the journal does not record as scheduled once and dispatched once.

    Those that were due when they were scheduled begin with that they were dispatched.
    """
    recorded: dict[str, list[str]] = defaultdict(list)
    position, deadline = FROM_THE_START, time.monotonic() + 60
    good = (["scheduled", "dispatched"], ["dispatched"])
    while True:
        while entries := client.read_journal(after=position, limit=10_000):
            position = entries[-1].position
            for entry in entries:
                recorded[entry.message_id].append(entry.change.value)
        wrong = sorted(name for name in figures.due if name not in figures.uncertain and recorded[name] not in good)
        # An empty read does not mean that no record is on its way.
        if not wrong or time.monotonic() > deadline:
            return wrong


def read_to_end(bootstrap: str, topics: Sequence[str]) -> Iterator[Message]:
    """Return all committed records."""
    with _reader(bootstrap) as consumer:
        places = _all_of(consumer, topics)
        consumer.assign(places)
        left = {(each.topic, each.partition) for each in places}
        deadline = time.monotonic() + 120
        while left:
            assert time.monotonic() < deadline, f"{left} cannot be read to the end"
            for record in consumer.consume(1000, 0.2):
                error = record.error()
                if error is None:
                    yield record
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard((record.topic(), record.partition()))


def _reader(bootstrap: str) -> Any:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"soak-{uuid4().hex}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 20,
            "log_level": 0,
        }
    )


def _all_of(consumer: Any, topics: Sequence[str]) -> list[TopicPartition]:
    return [
        TopicPartition(topic, partition, OFFSET_BEGINNING)
        for topic in topics
        for partition in partitions_of(consumer, topic)
    ]


def id_of(record: Message) -> str:
    return dict(record.headers() or [])["delay-id"].decode()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def _percentiles(ascending: list[int]) -> dict[str, int] | None:
    if not ascending:
        return None
    shares = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {"n": len(ascending)} | {
        name: ascending[min(len(ascending) - 1, int(share * len(ascending)))] for name, share in shares.items()
    }


def _share(values_ms: list[int], share: float) -> float:
    ascending = sorted(values_ms)
    return round(ascending[min(len(ascending) - 1, int(share * len(ascending)))] / 1000, 1)


def main(out: TextIO = sys.stdout) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--longest", type=float, help="the longest delay; as long as the whole by default")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--broker-kills", type=int, default=1)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--named", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for what dispatchers and broker say")
    args = parser.parse_args()
    work = Soak(
        messages=args.messages,
        seconds=args.seconds,
        longest=args.seconds if args.longest is None else args.longest,
        kills=args.kills,
        broker_kills=args.broker_kills,
        turns=args.turns,
        named=args.named,
        seed=args.seed,
        tell=lambda text: print(f"{time.strftime('%X')} {text}", file=sys.stderr, flush=True),
    )
    with tempfile.TemporaryDirectory(prefix="delay-soak-") as folder:
        if args.keep is not None:
            args.keep.mkdir(parents=True, exist_ok=True)
        figures = soak(work, args.keep or Path(folder))
    print(json.dumps({"seed": args.seed} | figures.as_dict()), file=out)
    sys.exit(0 if figures.is_good else 1)


if __name__ == "__main__":
    main()
