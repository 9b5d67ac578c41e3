"""The dispatcher on Spark beside the plain one: what kills cost, how late messages are, and when it falls behind.

Expected before measuring: a message waits for the end of its bucket (0.25 s on average), for the next micro-batch (half
of its duration), and for that micro-batch. A micro-batch has a fixed cost of a second or so on two cores, which more
messages hardly raise; the plain dispatcher has none. So Spark is a second or more late at any rate, and the rate at
which it falls behind grows with executors, which the plain dispatcher's does only with more dispatchers.

Late is what a reader of committed records sees: the time at which it gets a message, minus the due time.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.domain.message import Message
from benchmarks.kafka_node import PAYLOAD_BYTES, STOP, Node, Seen, config_of, open_node, run_dispatcher, started
from benchmarks.measurement import MismatchError, Results, expect, percentile, say
from benchmarks.streaming_job import Job, collect, serving
from tools.servers.spark import SparkCluster

BATCH = 10_000
STEP_SECONDS = 0.05
#: Messages that were due so soon before or after a kill are late because of it.
DISTURBED_SECONDS = (2.0, 60.0)
#: A rate is too much if the last third of its messages is so much later than the first.
BEHIND_MS = 3_000.0
#: How long messages may take after the last one is due.
PATIENCE_SECONDS = 300.0
PLAIN = "plain dispatcher"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    messages: int = 200_000
    delays: tuple[float, float] = (1.0, 180.0)
    kills: int = 3
    rates: tuple[int, ...] = (500, 1000, 2000, 4000, 8000, 16_000)
    rate_seconds: float = 60.0
    rate_delays: tuple[float, float] = (1.0, 30.0)
    executors: tuple[int, ...] = (1, 2)
    shards: int = 2
    trigger: float = 0.5


QUICK = Sizes(messages=2_000, delays=(1.0, 60.0), kills=1, rates=(200,), rate_seconds=8.0, rate_delays=(1.0, 5.0))


def run(node: Node, cluster: SparkCluster, sizes: Sizes, scratch: Path) -> Results:
    """Measure everything; raises when a message is lost, early or has come twice."""
    results = Results()
    _measure_bulk(node, results, sizes, job=None)
    with node.ladder() as settings:
        job = _job(settings, cluster, sizes, scratch, max(sizes.executors))
        _measure_bulk(node, results, sizes, job=job)
    for rate in sizes.rates:
        if not _measure_rate(node, results, sizes, rate, job=None):
            break
    for executors in sizes.executors:
        with node.ladder() as settings:
            job = _job(settings, cluster, sizes, scratch, executors)
            with serving(job):
                for rate in sizes.rates:
                    if not _measure_rate(node, results, sizes, rate, job=job):
                        break
    return results


def _job(settings: Mapping[str, Any], cluster: SparkCluster, sizes: Sizes, scratch: Path, executors: int) -> Job:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    return Job(settings, cluster, executors, folder, shards=sizes.shards, trigger=sizes.trigger)


# -- all at once, with kills -----------------------------------------------------------------------------------------


def _measure_bulk(node: Node, results: Results, sizes: Sizes, *, job: Job | None) -> None:
    """Schedule all messages at once, and kill the job while they become due."""
    store = PLAIN if job is None else _store(job)
    say(f"{sizes.messages} messages with delays of {sizes.delays[0]:g} to {sizes.delays[1]:g} s: {store}")
    kills: list[float] = []
    with ExitStack() as stack:
        settings = stack.enter_context(node.ladder()) if job is None else job.settings
        (channel,) = stack.enter_context(node.topics(1))
        patience = sizes.delays[1] + (sizes.kills + 1) * PATIENCE_SECONDS
        watcher = stack.enter_context(started(collect, node.bootstrap, channel, sizes.messages, patience))
        watcher.hear()
        dispatcher = None
        if job is None:
            dispatcher = stack.enter_context(started(run_dispatcher, settings))
            dispatcher.hear()
        else:
            results.add(store, "start of the job", [stack.enter_context(serving(job))], "s")
        begin = time.monotonic()
        _schedule_all(settings, channel, sizes)
        results.add(store, "bulk, scheduled", [sizes.messages / (time.monotonic() - begin)], "messages/s")
        if job is not None:
            for number in range(1, sizes.kills + 1):
                _sleep_until(begin + number * sizes.delays[1] / (sizes.kills + 1))
                kills.append(time.time() * 1000)
                job.kill()
                say(f"killed; serves again after {job.start():.0f} s")
        seen: list[Seen] = watcher.hear(patience + 60)
        if dispatcher is not None:
            dispatcher.ask(STOP)
    _check(results, store, seen, sizes.messages)
    calm = [each for each in seen if not _is_disturbed(each, kills)]
    _add_lateness(results, store, "bulk, all", seen)
    _add_lateness(results, store, "bulk, away from kills", calm)
    first, last = min(each.deliver_at for each in seen), max(each.seen_at for each in seen)
    results.add(store, "bulk, delivered", [sizes.messages / max(0.001, (last - first) / 1000)], "messages/s")


def _schedule_all(settings: Mapping[str, Any], channel: str, sizes: Sizes) -> None:
    chance, left = random.Random(1), sizes.messages
    with KafkaBroker(config_of(settings)) as broker:
        while left:
            now, n = datetime.now(UTC), min(BATCH, left)
            broker.schedule([_message(channel, now, chance.uniform(*sizes.delays)) for _ in range(n)])
            left -= n


def _check(results: Results, store: str, seen: Sequence[Seen], messages: int) -> None:
    ids = {each.message_id for each in seen}
    early = sum(each.written_at < each.deliver_at for each in seen)
    for name, count in (("lost", messages - len(ids)), ("twice", len(seen) - len(ids)), ("early", early)):
        results.add(store, f"{name}, of {messages:,}", [float(count)], "messages")
        say(f"{store}: {count} {name}")
    expect(f"messages of {store} that arrived", len(ids), messages)
    expect(f"messages of {store} that were early", early, 0)


def _is_disturbed(seen: Seen, kills: Sequence[float]) -> bool:
    before, after = (1000 * seconds for seconds in DISTURBED_SECONDS)
    return any(kill - before < seen.deliver_at < kill + after for kill in kills)


# -- steady rates ----------------------------------------------------------------------------------------------------


def _measure_rate(node: Node, results: Results, sizes: Sizes, rate: int, *, job: Job | None) -> bool:
    """Schedule at a steady rate and return whether the dispatcher kept up."""
    store = PLAIN if job is None else _store(job)
    say(f"{store}: {rate} messages/s for {sizes.rate_seconds:g} s")
    messages = int(rate * sizes.rate_seconds)
    with ExitStack() as stack:
        settings = stack.enter_context(node.ladder()) if job is None else job.settings
        (channel,) = stack.enter_context(node.topics(1))
        patience = sizes.rate_seconds + sizes.rate_delays[1] + PATIENCE_SECONDS
        watcher = stack.enter_context(started(collect, node.bootstrap, channel, messages, patience))
        watcher.hear()
        dispatcher = None
        if job is None:
            dispatcher = stack.enter_context(started(run_dispatcher, settings))
            dispatcher.hear()
        achieved = _produce(settings, channel, messages, rate, sizes)
        seen: list[Seen] = watcher.hear(patience + 60)
        if dispatcher is not None:
            dispatcher.ask(STOP)
    expect("messages that were early", sum(each.written_at < each.deliver_at for each in seen), 0)
    _add_lateness(results, store, f"{rate}/s", seen)
    results.add(store, f"{rate}/s, achieved by the producer", [achieved], "messages/s")
    arrived = len({each.message_id for each in seen})
    growth = _growth(seen)
    results.add(store, f"{rate}/s, later in the last third", [growth], "ms")
    kept_up = arrived == messages and growth < BEHIND_MS
    say(f"{store}: {rate}/s: {'keeps up' if kept_up else 'falls behind'} ({growth:.0f} ms, {arrived} of {messages})")
    return kept_up


def _produce(settings: Mapping[str, Any], channel: str, messages: int, rate: int, sizes: Sizes) -> float:
    chance, scheduled, begin = random.Random(1), 0, time.perf_counter()
    with KafkaBroker(config_of(settings)) as broker:
        while scheduled < messages:
            wanted = min(messages, int((time.perf_counter() - begin) * rate) + 1)
            now = datetime.now(UTC)
            delays = [chance.uniform(*sizes.rate_delays) for _ in range(scheduled, wanted)]
            broker.schedule([_message(channel, now, delay) for delay in delays])
            scheduled = wanted
            time.sleep(max(0.0, STEP_SECONDS - (time.perf_counter() - begin) % STEP_SECONDS))
    return messages / (time.perf_counter() - begin)


def _growth(seen: Sequence[Seen]) -> float:
    """Return how much later the median message of the last third is than that of the first."""
    late = [each.seen_at - each.deliver_at for each in sorted(seen, key=lambda each: each.deliver_at)]
    third = max(1, len(late) // 3)
    return percentile(late[-third:], 0.5) - percentile(late[:third], 0.5)


# -- pieces ----------------------------------------------------------------------------------------------------------


def _add_lateness(results: Results, store: str, name: str, seen: Sequence[Seen]) -> None:
    values = [each.seen_at - each.deliver_at for each in seen]
    for label, part in {"p50": 0.5, "p99": 0.99, "max": 1.0}.items():
        if values:
            results.add(store, f"{name}, late {label}", [percentile(values, part)], "ms")


def _store(job: Job) -> str:
    return f"Spark, {job.executors} executor{'s' if job.executors > 1 else ''}"


def _message(channel: str, now: datetime, delay: float) -> Message:
    return Message(channel=channel, payload=os.urandom(PAYLOAD_BYTES), deliver_at=now + timedelta(seconds=delay))


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write CSV; 1 when a message was lost or early."""
    from dataclasses import replace

    from benchmarks import results, streaming_report

    parser = results.parser("streaming", "Measure the dispatcher on Spark beside the plain one.")
    parser.add_argument("--messages", type=int, help="how many messages wait while the job is killed")
    parser.add_argument("--rates", type=int, nargs="+", help="messages/s, ascending")
    parser.add_argument("--executors", type=int, nargs="+", help="how many executors, one after the other")
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else Sizes()
    given = {"messages": options.messages, "rates": options.rates, "executors": options.executors}
    sizes = replace(sizes, **{name: value for name, value in given.items() if value is not None})
    folder = options.results or (results.QUICK_FOLDER if options.quick else results.FOLDER)
    begin, load_at_begin = time.monotonic(), os.getloadavg()[0]
    cluster = SparkCluster(workers=max(sizes.executors), cores=1)
    with tempfile.TemporaryDirectory(prefix="delay-bench-") as scratch, ExitStack() as stack:
        node = stack.enter_context(open_node(Path(scratch)))
        stack.callback(cluster.stop)
        cluster.start(Path(scratch))
        try:
            found = run(node, cluster, sizes, Path(scratch))
        except MismatchError as mismatch:
            print(f"error: {mismatch}", file=sys.stderr)
            return 1
        software = {"kafka": node.version(), "pyspark": version("pyspark")}
    results.write_csv(folder / "streaming.csv", found.measurements)
    results.write_machine(folder / "streaming_machine.json", software, quick=options.quick, load_at_begin=load_at_begin)
    streaming_report.draw(found, folder)
    results.print_table("Dispatcher on Spark", found.measurements)
    say(f"no message was lost or early; {time.monotonic() - begin:.0f} s; results in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
