"""Messages wait on a RabbitMQ that is killed again and again: `python -m tests.acceptance.rabbitmq_soak`.

A publisher, whose connection is cut every few seconds, and a consumer run as processes of their own. At the end every
id must have arrived, none before its time, and no queue of the ladder may hold anything.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.brokers.rabbitmq.names import UNROUTABLE
from airflow_delay_provider.brokers.rabbitmq.topology import Topology
from airflow_delay_provider.domain.lifecycle import FROM_THE_START
from tests.acceptance.rabbitmq_clients import now_ms
from tests.acceptance.rabbitmq_positions import Positions, find_positions, parked_ids
from tests.ladder_path import path_of
from tests.rabbits import VERSIONS, config_of, declare_queue
from tools.servers.cutting_proxy import CuttingProxy
from tools.servers.rabbitmq import SOON_DEAD_LETTERED_AGAIN, RabbitMQ

CHANNEL = "soak"
LOST = "in no queue"
DEFAULT_DEAD_LETTER_SECONDS = 180
#: After a restart, the backlog is forwarded and the consumer reconnects.
SETTLE_MS = 10_000
#: A message that is due so shortly before a kill may not have arrived yet: a tick, and the delay of a busy machine.
DUE_BEFORE_MS = 3_000


@dataclass(frozen=True, kw_only=True)
class Soak:
    """The settings of a run."""

    messages: int
    version: str = "rabbitmq3"
    kills: int = 3
    #: How long the publisher takes if nothing stops it.
    seconds: float = 60
    shortest: float = 1
    longest: float = 60
    tick: float = 1.0
    cut_every: float = 4
    down: tuple[float, float] = (0, 5)
    default_timeout: bool = False
    #: The publisher wakes queues that wait before they dead-letter again, when it is connected again.
    wake: bool = False
    seed: int = 0
    tell: Callable[[str], None] = print


@dataclass(frozen=True, kw_only=True)
class Published:
    """The publisher's record of a message."""

    due_ms: int
    published_ms: int
    confirmed_ms: int
    attempts: int


@dataclass(kw_only=True)
class Figures:
    """The results of a run."""

    published: dict[str, Published] = field(default_factory=dict)
    #: When each id arrived, as often as it did.
    arrived: dict[str, list[int]] = field(default_factory=dict)
    #: From the kill until connections were accepted again.
    outages: list[tuple[int, int]] = field(default_factory=list)
    cuts: int = 0
    left_behind: dict[str, int] = field(default_factory=dict)
    unroutable: int = 0
    #: Where each id that did not arrive was seen last; ``LOST`` if it is in no queue.
    last_seen: dict[str, str] = field(default_factory=dict)
    #: The messages that the node held when some did not arrive.
    positions: Positions = field(default_factory=Positions)

    @property
    def missing(self) -> list[str]:
        """Ids that did not arrive, whether they are lost or stuck."""
        return sorted(set(self.published) - set(self.arrived))

    @property
    def lost(self) -> list[str]:
        """Ids that no queue holds."""
        return [name for name in self.missing if self.last_seen.get(name, LOST).startswith(LOST)]

    @property
    def stuck(self) -> dict[str, str]:
        """Overdue ids that a queue still holds, and where."""
        return {name: self.last_seen[name] for name in self.missing if name not in set(self.lost)}

    @property
    def strange(self) -> list[str]:
        """Ids that were not published."""
        return sorted(set(self.arrived) - set(self.published))

    @property
    def early(self) -> list[str]:
        return [name for name, at in self.arrived.items() if at[0] < self.published[name].due_ms]

    @property
    def duplicates(self) -> int:
        return sum(len(at) - 1 for at in self.arrived.values())

    @property
    def is_good(self) -> bool:
        return not (self.missing or self.strange or self.early or self.left_behind or self.unroutable)

    def lateness_ms(self, *, undisturbed: bool = False) -> list[int]:
        """How late each id came first, or each of those whose whole life lies outside of outages."""
        return sorted(
            at[0] - self.published[name].due_ms
            for name, at in self.arrived.items()
            if not undisturbed or not self._is_disturbed(self.published[name])
        )

    def _is_disturbed(self, message: Published) -> bool:
        return message.attempts > 1 or any(
            down - DUE_BEFORE_MS <= message.due_ms and message.published_ms <= up + SETTLE_MS
            for down, up in self.outages
        )

    def __str__(self) -> str:
        every, calm = self.lateness_ms(), self.lateness_ms(undisturbed=True)
        again = sum(each.attempts > 1 for each in self.published.values())
        down = ", ".join(f"{(up - at) / 1000:.1f}" for at, up in self.outages)
        return "\n".join(
            (
                f"published    {len(self.published)}, {again} of them more than once; connection cut {self.cuts} times",
                f"killed       {len(self.outages)} times; back after {down} s",
                f"lost         {len(self.lost)} {self.lost[:5] or ''}",
                f"stuck        {len(self.stuck)}",
                *(f"  {count:6d} {where}" for where, count in Counter(self.last_seen.values()).most_common()),
                *((f"held by the node\n{self.positions}",) if self.missing or self.left_behind else ()),
                f"early        {len(self.early)} {self.early[:5] or ''}",
                f"duplicates   {self.duplicates}, all with ids that were published: {not self.strange}",
                f"left behind  {sum(self.left_behind.values())} {self.left_behind or ''}; unroutable {self.unroutable}",
                f"lateness     p50 {_ms(every, 0.5)}, p99 {_ms(every, 0.99)}, max {_ms(every, 1)}",
                f"  undisturbed p50 {_ms(calm, 0.5)}, p99 {_ms(calm, 0.99)}, max {_ms(calm, 1)}; {len(calm)} messages",
            )
        )


def soak(work: Soak, run_dir: Path) -> Figures:
    """Run the soak on a private node."""
    node = VERSIONS[work.version](advanced="" if work.default_timeout else SOON_DEAD_LETTERED_AGAIN)
    node.start(run_dir)
    try:
        return _soak(work, node, run_dir)
    finally:
        node.stop()


def _soak(work: Soak, node: RabbitMQ, run_dir: Path) -> Figures:
    figures, source = Figures(), random.Random(work.seed)
    # Before the ladder, whose creation lasts until all that was declared before outlives a killed broker.
    declare_queue(node.url, CHANNEL, **{"x-queue-type": "quorum"})
    with RabbitMQBroker(config_of(node.url, tick=work.tick)) as broker:
        # With the relay of the channel: 3.10 brings queues back without a leader if it is killed a second after they
        # were declared (docs/rabbitmq.md), which would stop the channel.
        broker.create_topology([CHANNEL])
        prefix = f"{broker.topology.prefix}."
    published, arrived = run_dir / "published", run_dir / "arrived"
    publish = (
        *("publish", "--log", str(published), "--tick", str(work.tick)),
        *("--messages", str(work.messages), "--seconds", str(work.seconds), "--seed", str(work.seed)),
        *("--shortest", str(work.shortest), "--longest", str(work.longest)),
        *(("--management-url", node.management_url) if work.wake else ()),
    )
    with (
        CuttingProxy(node.port) as proxy,
        running(node.url, "consume", "--log", str(arrived)),
        running(node.url.replace(f":{node.port}/", f":{proxy.port}/"), *publish) as publisher,
    ):
        _disturb(work, node, proxy, publisher, figures, source)
        assert publisher.wait() == 0, "the publisher failed"
        figures.published = read_published(published)
        assert len(figures.published) == work.messages
        work.tell("all published")
        _wait_until_quiet(work, node, prefix, arrived, figures)
        if figures.missing or figures.left_behind:
            figures.positions = find_positions(node)
        if figures.missing:
            with RabbitMQBroker(config_of(node.url, tick=work.tick)) as broker:
                figures.last_seen = find_missing(figures, broker, parked_ids(node, UNROUTABLE))
    return figures


def find_missing(figures: Figures, broker: RabbitMQBroker, parked: Collection[str]) -> dict[str, str]:
    """Say where each id that did not arrive was seen last.

    A queue says which messages its dead-letter worker holds, and only how many others: those are counted as the ids
    whose way leads through that queue, and no more ids than it has messages.
    """
    topology, found = broker.topology, {}
    room = Counter(figures.positions.behind) + Counter(figures.positions.ready)
    outcomes = broker.find_outcomes(figures.missing, since=FROM_THE_START)
    for name in figures.missing:
        journal = (
            f"the journal says {outcomes[name].change.value}" if name in outcomes else "the journal knows no outcome"
        )
        if held := figures.positions.held.get(name):
            found[name] = f"held by the dead-letter worker of {held.queue}, {held.why}; {journal}"
        elif name in parked:
            found[name] = f"parked in {UNROUTABLE}; {journal}"
        elif rung := next((rung for rung in _rungs_of(topology, figures.published[name]) if room[rung]), None):
            room[rung] -= 1
            state = "behind what its dead-letter worker holds" if rung in figures.positions.behind else "ready"
            found[name] = f"in {rung}, {state}; {journal}"
        else:
            found[name] = f"{LOST}; {journal}"
    return found


def _rungs_of(topology: Topology, message: Published) -> Iterator[str]:
    """Return the rungs in which a message may be, the channel's queue last; when it was published is known roughly."""
    for at in (message.published_ms, message.confirmed_ms):
        for tick in (0, topology.tick_ms):
            for hold_ms in path_of(topology.ladder, max(1, message.due_ms - at + tick)):
                yield topology.rung(hold_ms)
    yield CHANNEL


def _disturb(
    work: Soak,
    node: RabbitMQ,
    proxy: CuttingProxy,
    publisher: subprocess.Popen[bytes],
    figures: Figures,
    source: random.Random,
) -> None:
    """Kill the broker at moments spread over the time of publishing, and cut the publisher's connection in between."""
    started = time.monotonic()
    kills = [started + work.seconds * (n + source.random()) / work.kills for n in range(work.kills)]
    next_cut = started + work.cut_every * source.random()
    while kills or publisher.poll() is None:
        now = time.monotonic()
        if kills and now >= kills[0]:
            kills.pop(0)
            down = now_ms()
            node.kill()
            time.sleep(source.uniform(*work.down))
            node.start_again()
            figures.outages.append((down, now_ms()))
            work.tell(f"killed; up again after {(now_ms() - down) / 1000:.1f} s")
        elif now >= next_cut and proxy.cut():
            figures.cuts += 1
            next_cut = now + 2 * work.cut_every * source.random()
        time.sleep(0.02)


def _wait_until_quiet(work: Soak, node: RabbitMQ, prefix: str, arrived: Path, figures: Figures) -> None:
    """Return when all have arrived and no message waits, or when that has taken too long."""
    patience = 90 + (DEFAULT_DEAD_LETTER_SECONDS if work.default_timeout else 0)
    deadline = max(time.monotonic(), time.monotonic() + (_last_due_ms(figures) - now_ms()) / 1000) + patience
    counted = -1
    while time.monotonic() < deadline:
        figures.arrived = read_arrived(arrived)
        figures.left_behind = count_messages(node, prefix)
        total = sum(len(at) for at in figures.arrived.values())
        if not figures.missing and not figures.left_behind and not count_messages(node, CHANNEL) and total == counted:
            break
        counted = total
        # The broker updates its counts every 5 s.
        time.sleep(3)
    figures.unroutable = count_messages(node, UNROUTABLE).get(UNROUTABLE, 0)


def _last_due_ms(figures: Figures) -> int:
    return max(each.due_ms for each in figures.published.values())


@contextmanager
def running(url: str, role: str, *more: str, channel: str = CHANNEL) -> Iterator[subprocess.Popen[bytes]]:
    """A client as a process of its own, killed at the end."""
    command = [sys.executable, "-m", "tests.acceptance.rabbitmq_clients", role, "--url", url, "--channel", channel]
    process = subprocess.Popen([*command, *more])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _ms(ascending: list[int], share: float) -> str:
    return f"{ascending[min(len(ascending) - 1, int(share * len(ascending)))]} ms" if ascending else "-"


def read_published(log: Path) -> dict[str, Published]:
    found = {}
    for line in log.read_text().splitlines():
        name, *numbers = line.split()
        due, at, confirmed, attempts = map(int, numbers)
        found[name] = Published(due_ms=due, published_ms=at, confirmed_ms=confirmed, attempts=attempts)
    return found


def read_arrived(log: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    if log.exists():
        text = log.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            name, at = line.split()
            found.setdefault(name, []).append(int(at))
    return found


def count_messages(node: RabbitMQ, prefix: str) -> dict[str, int]:
    """Return how many messages the queues of that name hold, with those on their way to the next queue."""
    lines = [
        line.split("\t") for line in node.control("list_queues", "--no-table-headers", "name", "messages").splitlines()
    ]
    return {name: int(count) for name, count in lines if name.startswith(prefix) and int(count or 0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--version", choices=list(VERSIONS), default="rabbitmq3")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--longest", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--default-timeout", action="store_true", help="dead-letter again after RabbitMQ's 180 s instead of 3 s"
    )
    parser.add_argument("--wake", action="store_true", help="give the publisher a management_url")
    args = parser.parse_args()
    work = Soak(
        messages=args.messages,
        version=args.version,
        kills=args.kills,
        seconds=args.seconds,
        longest=args.longest,
        seed=args.seed,
        default_timeout=args.default_timeout,
        wake=args.wake,
        tell=lambda text: print(f"{time.strftime('%X')} {text}", flush=True),
    )
    with tempfile.TemporaryDirectory(prefix="delay-soak-") as folder:
        figures = soak(work, Path(folder))
    print(f"{args.version}, {args.messages} messages\n{figures}")
    sys.exit(0 if figures.is_good else 1)


if __name__ == "__main__":
    main()
