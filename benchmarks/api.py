"""``./dev bench api``: what a request to the HTTP API costs in a small and in a large ledger, on SQLite and PostgreSQL.

Expected first, counted in the code: a page reads one stretch of an index for each state (for a connection two), at most
51 rows of each; counts are kept; a series reads the figures of its intervals. So no answer should take longer because
the ledger is larger. The aim is a ratio of the 99th percentiles of at most 1.5.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.metadata import version

from airflow_delay_provider.brokers.ledger.listing import Cursor
from airflow_delay_provider.domain.lifecycle import State
from benchmarks import api_report, api_rows, results
from benchmarks.api_rows import CHANNELS, DAGS, HELD_BY_BROKER, HELD_BY_LEDGER, TASKS
from benchmarks.api_server import Client, serve
from benchmarks.databases import Database, run_on_databases
from benchmarks.measurement import MismatchError, Results, expect, percentile, say

SMALL, LARGE = "bench_small", "bench_large"
PAGE = 50


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    messages: tuple[int, int] = (1_000, 1_000_000)
    #: Requests for each route and ledger, in each repeat.
    requests: int = 100
    repeats: int = 3


QUICK = Sizes(messages=(1_000, 20_000), requests=10, repeats=1)


@dataclass(frozen=True, kw_only=True)
class Route:
    """What is asked for."""

    name: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    #: Where the answer has its list, and how long that must be: a faster answer with less in it is no measurement.
    items: str = "messages"
    length: int = PAGE


def routes(now: datetime, message_id: str) -> Iterator[Route]:
    """Return all routes that list, count or show messages; ``message_id`` is a dead message."""
    middle = Cursor(backwards=False, deliver_at_ms=int((now - timedelta(days=15)).timestamp() * 1000), seq=0).token
    back = Cursor(backwards=True, deliver_at_ms=int((now - timedelta(days=15)).timestamp() * 1000), seq=0).token
    filters = {
        "all": {},
        "page in the middle": {"page": middle},
        "page in the middle, backwards": {"page": back},
        "by state": {"state": State.DISPATCHED.name},
        "by channel": {"channel": CHANNELS[0]},
        "by channel and state": {"channel": CHANNELS[0], "state": State.SCHEDULED.name},
        "by connection, broker-held": {"connection": HELD_BY_BROKER},
        "by connection, ledger-held": {"connection": HELD_BY_LEDGER},
        "by connection, embedded": {"connection": ""},
        "by channel and connection": {"channel": CHANNELS[0], "connection": HELD_BY_BROKER},
        "by DAG": {"dag_id": DAGS[0]},
        "by DAG, run and task": {"dag_id": DAGS[0], "run_id": "run_0", "task_id": TASKS[0]},
        "by due time": {
            "due_from": (now + timedelta(hours=1)).isoformat(),
            "due_to": (now + timedelta(days=30)).isoformat(),
        },
        "by text in many ids": {"search": "a1"},
    }
    for name, query in filters.items():
        yield Route(name=f"messages {name}", path="messages", query=query)
    yield Route(name="messages by a whole id", path="messages", query={"search": message_id}, length=1)
    yield Route(name="messages by text in no id", path="messages", query={"search": "zz"}, length=0)
    yield Route(name="one message", path=f"messages/{message_id}", items="actions", length=1)
    yield Route(name="history", path=f"history/{message_id}", items="entries", length=3)
    yield Route(name="counts", path="counts", items="counts", length=len(State))
    yield Route(
        name="counts of a channel", path="counts", query={"channel": CHANNELS[0]}, items="counts", length=len(State)
    )
    yield Route(name="channels", path="channels", items="channels", length=len(CHANNELS))
    yield Route(name="dead letters", path="dead-letters")
    yield Route(name="retries", path="retries", items="retries")
    yield Route(name="health", path="health", items="problems", length=1)
    for window, points, bins in (("hour", 60, 60), ("day", 24, 24), ("month", 30, 30)):
        yield Route(name=f"series {window}", path="series", query={"range": window}, items="points", length=points)
        yield Route(name=f"upcoming {window}", path="upcoming", query={"range": window}, items="bins", length=bins)


def run(databases: Sequence[Database], sizes: Sizes) -> Results:
    """Measure everything; raises ``MismatchError`` when an answer is wrong."""
    found = Results()
    for database in databases:
        with ExitStack() as stack:
            now_ms = int(time.time() * 1000)
            urls = {}
            for conn_id, n in zip((SMALL, LARGE), sizes.messages, strict=True):
                say(f"{database.name}: loading {n:,} messages")
                urls[conn_id] = stack.enter_context(database.fresh())
                api_rows.fill(database, urls[conn_id], n=n, now_ms=now_ms)
            client = stack.enter_context(serve(urls))
            _measure(client, database.name, found, sizes, datetime.fromtimestamp(now_ms / 1000, UTC))
    return found


def _measure(client: Client, store: str, found: Results, sizes: Sizes, now: datetime) -> None:
    asked = {conn_id: list(routes(now, _dead_message(client, conn_id))) for conn_id in (SMALL, LARGE)}
    pairs = list(zip(asked[SMALL], asked[LARGE], strict=True))
    for small, large in pairs:
        _check(client, small, SMALL)
        _check(client, large, LARGE)
    p50: dict[tuple[str, str], list[float]] = {}
    p99: dict[tuple[str, str], list[float]] = {}
    for repeat in range(sizes.repeats):
        say(f"{store}: repeat {repeat + 1}/{sizes.repeats}")
        times: dict[tuple[str, str], list[float]] = {}
        for number in range(sizes.requests):
            for small, large in pairs:
                turns = [(small, SMALL), (large, LARGE)]
                for route, conn_id in turns if number % 2 else reversed(turns):
                    times.setdefault((route.name, conn_id), []).append(_milliseconds(client, route, conn_id))
        for key, values in times.items():
            p50.setdefault(key, []).append(percentile(values, 0.5))
            p99.setdefault(key, []).append(percentile(values, 0.99))
    for small, _ in pairs:
        for share, measured in (("p50", p50), ("p99", p99)):
            base, name = (api_report.label(small.name, n, share) for n in sizes.messages)
            at_small, at_large = measured[(small.name, SMALL)], measured[(small.name, LARGE)]
            found.add(store, base, at_small, "ms")
            found.add(store, name, at_large, "ms", ratio_to=base, base=at_small)


def _dead_message(client: Client, conn_id: str) -> str:
    """Return a message in the middle of the dead ones."""
    middle = Cursor(backwards=False, deliver_at_ms=int((time.time() - 86_400) * 1000), seq=0).token
    found = client.get_json("dead-letters", {"conn_id": conn_id, "page": middle})
    message_id: str = found["messages"][0]["id"]
    return message_id


def _check(client: Client, route: Route, conn_id: str) -> None:
    answer = client.get_json(route.path, _query(route, conn_id))
    expect(f"{route.items} of {route.name} in {conn_id}", len(answer[route.items]), route.length)


def _milliseconds(client: Client, route: Route, conn_id: str) -> float:
    query = _query(route, conn_id)
    begin = time.perf_counter()
    client.get(route.path, query)
    return (time.perf_counter() - begin) * 1000


def _query(route: Route, conn_id: str) -> dict[str, str]:
    # A ledger names embedded messages by its own connection.
    given = {name: value or conn_id for name, value in route.query.items()}
    return {"conn_id": conn_id, **given}


def main(arguments: list[str] | None = None, *, sizes: Sizes | None = None) -> int:
    """Measure, print, write CSV and a picture; 1 when an answer was wrong."""
    options = results.parser("api", "Measure the HTTP API.").parse_args(arguments)
    sizes = sizes or (QUICK if options.quick else Sizes())
    folder = options.results or (results.QUICK_FOLDER if options.quick else results.FOLDER)
    begin, load_at_begin = time.monotonic(), os.getloadavg()[0]
    try:
        found, versions = run_on_databases(lambda databases: run(databases, sizes))
    except MismatchError as mismatch:
        print(f"error: {mismatch}", file=sys.stderr)
        return 1
    results.write_csv(folder / "api.csv", found.measurements)
    software = versions | {
        "airflow": version("apache-airflow-core"),
        "fastapi": version("fastapi"),
        "uvicorn": version("uvicorn"),
        "sqlalchemy": version("sqlalchemy"),
        "requests": sizes.requests,
        "repeats": sizes.repeats,
    }
    results.write_machine(folder / "api_machine.json", software, quick=options.quick, load_at_begin=load_at_begin)
    api_report.draw(found, folder)
    print(api_report.table(found.measurements))
    say(f"all answers were complete; {time.monotonic() - begin:.0f} s; results in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
