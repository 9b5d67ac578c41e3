"""``./dev bench rabbitmq``: rates, broker CPU and lateness of the ladder in RabbitMQ, compared with alternatives.

Expected first, counted in the topology (docs/performance.md). A wait in a rung is one route, one durable write, one
expiry and one removal. With delays of 1 to 20 ticks a message waits 1.20 times in our ladder (digits of 16) and 2.15
times in the binary one, and then lies in its channel: 2.2 queues against 3.15. So the broker should spend about 0.7 of
the CPU time, and less when routing is counted: a topic exchange looks at each word of the key, of which we have 7 and
the binary ladder 28. Publishing writes into one queue either way and shares the wait for the disk with up to 1000
others. Ours goes through one fanout exchange and to dozens of queues instead of one, so we hope for half of the raw
rate. The journal is another write on the way in and two on the way out, because the dispatch log comes first.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks import rabbitmq_measure, rabbitmq_report, results
from benchmarks.measurement import MismatchError, Results, say
from benchmarks.rabbitmq_measure import Node, open_node
from benchmarks.rabbitmq_methods import open_methods


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    publish_messages: int = 10_000
    single_messages: int = 300
    publish_repeats: int = 5
    delivery_seconds: float = 5.0
    delivery_repeats: int = 2
    idle_seconds: float = 5.0


QUICK = Sizes(
    publish_messages=1_000,
    single_messages=50,
    publish_repeats=1,
    delivery_seconds=0.5,
    delivery_repeats=1,
    idle_seconds=1.0,
)
#: So that a quick run is quick.
QUICK_DELAY_SECONDS = (1, 3)


def run(node: Node, sizes: Sizes) -> tuple[Results, float]:
    """Measure everything and return it with the CPU share of an idle broker; raises when a count is wrong."""
    found = Results()
    say("declaring the ladders")
    with open_methods(node.url) as methods:
        rates = rabbitmq_measure.measure_rates(
            node,
            methods,
            found,
            messages=sizes.publish_messages,
            single_messages=sizes.single_messages,
            repeats=sizes.publish_repeats,
        )
        idle_share = node.idle_share(sizes.idle_seconds)
        cpu = rabbitmq_measure.measure_deliveries(
            node,
            methods,
            found,
            seconds=sizes.delivery_seconds,
            repeats=sizes.delivery_repeats,
            idle_share=idle_share,
        )
    rabbitmq_report.add_ratios(found, rates=rates, cpu=cpu)
    return found, idle_share


def main(arguments: list[str] | None = None, *, sizes: Sizes | None = None) -> int:
    """Measure, print, write CSV and pictures; 1 when a message was early or did not arrive."""
    options = results.parser("rabbitmq", "Measure the ladder in RabbitMQ.").parse_args(arguments)
    if options.quick:
        rabbitmq_measure.DELAY_SECONDS = QUICK_DELAY_SECONDS
    sizes = sizes or (QUICK if options.quick else Sizes())
    folder = options.results or (results.QUICK_FOLDER if options.quick else results.FOLDER)
    begin, load_at_begin = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="delay-bench-") as scratch, open_node(Path(scratch)) as node:
        try:
            found, idle_share = run(node, sizes)
        except MismatchError as mismatch:
            print(f"error: {mismatch}", file=sys.stderr)
            return 1
        software = {
            "rabbitmq": node.version(),
            "pika": version("pika"),
            "kombu": version("kombu"),
            "idle_cpu_percent": round(idle_share * 100, 1),
        }
    results.write_csv(folder / "rabbitmq.csv", found.measurements)
    results.write_machine(folder / "rabbitmq_machine.json", software, quick=options.quick, load_at_begin=load_at_begin)
    rabbitmq_report.draw_all(found, folder)
    results.print_table("RabbitMQ benchmark", found.measurements)
    print(rabbitmq_report.table(found.measurements))
    say(f"all messages arrived, none early; {time.monotonic() - begin:.0f} s; results in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
