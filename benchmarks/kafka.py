"""``./dev bench kafka``: rates, writes, CPU, lateness and restarts of the ladder in Kafka, beside plain Kafka.

Expected first, counted in the code (docs/performance.md). Scheduling is one record a message, like a plain produce:
on top of it comes Python: checks, the envelope, the receipt. The client needs about 2 us for a produce and ours several
times that, so the interpreter limits the ratio, not the broker. A message of 1 h is written 5 times behind the
inbox with radix 4 (4 rungs and the delivery), so if each write cost what one of a plain copy loop costs, the rate would
be 0.2 of it; moves carry no headers and are cheaper than that. Lateness is the time that a transaction with deliveries
stays open (up to 25 ms), what its commit takes, and the reader's next fetch. A restart reads offsets and notes, not
messages, so it should take the same time for any number of waiting messages.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

# Processes that are measured import this file too: what only main() needs, it imports itself.
from benchmarks import kafka_dispatch, kafka_realtime, kafka_schedule, kafka_writes
from benchmarks.kafka_node import Node, open_node
from benchmarks.measurement import MismatchError, Results, say


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    schedule_messages: int = 100_000
    schedule_repeats: int = 5
    dispatch_messages: int = 60_000
    dispatch_repeats: int = 3
    #: For each delay; and the delays that are measured, times the one that is named.
    writes_messages: int = 200
    writes_delays: tuple[str, ...] = tuple(kafka_writes.DELAYS_MS)
    writes_factors: tuple[float, ...] = (0.75, 1.0)
    radixes: tuple[int, ...] = (2, 4, 16)
    idle_seconds: float = 4.0
    idle_repeats: int = 2
    lateness_seconds: float = 30.0
    lateness_delays: tuple[float, float] = (3.0, 10.0)
    pending: int = 200_000
    restart_repeats: int = 3
    large: int = 1_000


QUICK = Sizes(
    schedule_messages=20_000,
    schedule_repeats=2,
    dispatch_messages=8_000,
    dispatch_repeats=1,
    writes_messages=40,
    writes_factors=(1.0,),
    radixes=(4,),
    idle_seconds=1.0,
    idle_repeats=1,
    lateness_seconds=2.0,
    lateness_delays=(1.0, 3.0),
    pending=10_000,
    restart_repeats=1,
    large=50,
)


def run(node: Node, sizes: Sizes) -> Results:
    """Measure everything; raises when a count is wrong."""
    from benchmarks import kafka_report

    found = Results()
    with ExitStack() as stack:
        say("creating the ladders")
        ladders = {radix: stack.enter_context(node.ladder(radix)) for radix in sizes.radixes}
        with node.ladder(4) as inbox_only:
            schedule = kafka_schedule.measure(
                node, inbox_only, found, messages=sizes.schedule_messages, repeats=sizes.schedule_repeats
            )
        dispatch = kafka_dispatch.measure(
            node, ladders, found, messages=sizes.dispatch_messages, repeats=sizes.dispatch_repeats
        )
        kafka_realtime.measure_lateness(
            node, ladders[4], found, seconds=sizes.lateness_seconds, delays=sizes.lateness_delays
        )
        kafka_writes.count(found)
        kafka_writes.measure(
            node,
            ladders,
            found,
            messages=sizes.writes_messages,
            delays=sizes.writes_delays,
            factors=sizes.writes_factors,
        )
        kafka_realtime.measure_idle(node, ladders, found, seconds=sizes.idle_seconds, repeats=sizes.idle_repeats)
        kafka_realtime.measure_restart(node, ladders[4], found, pending=sizes.pending, repeats=sizes.restart_repeats)
        kafka_realtime.measure_large(node, found, messages=sizes.large)
    kafka_report.add_ratios(found, schedule=schedule, dispatch=dispatch)
    return found


def main(arguments: list[str] | None = None, *, sizes: Sizes | None = None) -> int:
    """Measure, print, write CSV and pictures; 1 when a message was early, lost, doubled or written too often."""
    from benchmarks import kafka_report, results

    parser = results.parser("kafka", "Measure the ladder in Kafka.")
    parser.add_argument("--pending", type=int, help="how many messages wait when a dispatcher is started")
    options = parser.parse_args(arguments)
    sizes = sizes or (QUICK if options.quick else Sizes())
    if options.pending is not None:
        sizes = replace(sizes, pending=options.pending)
    folder = options.results or (results.QUICK_FOLDER if options.quick else results.FOLDER)
    begin, load_at_begin = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="delay-bench-") as scratch, open_node(Path(scratch)) as node:
        idle_share = node.idle_share(sizes.idle_seconds)
        try:
            found = run(node, sizes)
        except MismatchError as mismatch:
            print(f"error: {mismatch}", file=sys.stderr)
            return 1
        software = {
            "kafka": node.version(),
            "confluent-kafka": version("confluent-kafka"),
            "idle_cpu_percent": round(idle_share * 100, 1),
        }
    found.measurements.sort(key=lambda m: kafka_report.DESIGNS.index(m.store))
    results.write_csv(folder / "kafka.csv", found.measurements)
    results.write_machine(folder / "kafka_machine.json", software, quick=options.quick, load_at_begin=load_at_begin)
    kafka_report.draw_all(found, folder)
    results.print_table("Kafka benchmark", found.measurements)
    print(kafka_report.aims_table(found.measurements))
    say(f"all messages arrived once, none early; {time.monotonic() - begin:.0f} s; results in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
