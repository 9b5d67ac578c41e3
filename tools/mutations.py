"""``python -m tools.mutations [number ...]``: breaks the code on purpose, and checks that tests notice.

Each mutation changes one place in a temporary copy of the tree and runs the tests that must fail then. A mutation that
no test notices is a survivor; survivors are printed, and the exit code is 1. Places are found by their content, so
that renamed files do not matter.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "airflow_delay_provider"
#: What is not copied: large, or of another run.
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".run", ".mypy_cache", ".ruff_cache", ".pytest_cache", "__pycache__")
TESTS_FAILED = 1
#: A test that hangs has noticed too.
TEST_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One mistake, and the tests that must notice it."""

    #: The guarantee that is broken.
    breaks: str
    #: The part of the package in which ``place`` is looked for.
    part: str
    #: A regular expression that matches exactly once in that part.
    place: str
    #: What stands there instead; groups of the expression can be used.
    mistake: str
    #: Arguments of pytest.
    tests: str
    #: The environment variable of a server without which these tests skip.
    server: str | None = None


POSTGRES, RABBITMQ, KAFKA = "DELAY_TEST_POSTGRES_URL", "DELAY_TEST_RABBITMQ_URL", "DELAY_TEST_KAFKA_BOOTSTRAP"

MUTATIONS = [
    # -- never early
    Mutation(
        breaks="a due time is rounded up",
        part="domain",
        place=r"return -\(\(EPOCH - moment\) // ONE_MS\)",
        mistake="return (moment - EPOCH) // ONE_MS",
        tests="tests/unit/domain",
    ),
    Mutation(
        breaks="the present is rounded down",
        part="domain",
        place=r"return \(moment - EPOCH\) // ONE_MS",
        mistake="return -((EPOCH - moment) // ONE_MS)",
        tests="tests/unit/domain",
    ),
    Mutation(
        breaks="the ledger delivers nothing early",
        part="brokers/ledger",
        place=r"(_HERE, _MESSAGE\.deliver_at_ms <= now_ms)",
        mistake=r"\1 + 1",
        tests="tests/unit/brokers/ledger tests/unit/dispatcher",
    ),
    Mutation(
        breaks="no hold is longer than the remaining delay",
        part="domain",
        place=r"bisect_right\(self\.holds_ms, remaining_ms\)",
        mistake="bisect_right(self.holds_ms, remaining_ms + self.tick_ms)",
        tests="tests/unit/domain",
    ),
    Mutation(
        breaks="a delay is rounded up to whole ticks",
        part="domain",
        place=r"-\(-delay_ms // self\.tick_ms\)",
        mistake="(delay_ms // self.tick_ms)",
        tests="tests/unit/domain",
    ),
    Mutation(
        breaks="Kafka's dispatcher delivers nothing early",
        part="brokers/kafka",
        place=r"due_soon\[0\]\[0\] <= now_ms",
        mistake="due_soon[0][0] <= now_ms + 5",
        tests="tests/unit/brokers/kafka",
    ),
    Mutation(
        breaks="a rest on RabbitMQ makes good for two roundings",
        part="brokers/rabbitmq",
        place=r"EXTRA_HOLD_MS = 2",
        mistake="EXTRA_HOLD_MS = 0",
        tests="tests/unit/brokers/rabbitmq/test_topology.py",
    ),
    Mutation(
        breaks="no rest on RabbitMQ is longer than it must be",
        part="brokers/rabbitmq",
        place=r'"x-message-ttl": hold_ms \+ EXTRA_HOLD_MS',
        mistake=r"\g<0> + 5000",
        tests="tests/unit/brokers/rabbitmq/test_topology.py",
    ),
    Mutation(
        breaks="a requeued message is not early",
        part="brokers/ledger",
        place=r"return ceil_ms\(self\.clock\.now\(\) \+ delay\)",
        mistake="return floor_ms(self.clock.now() + delay)",
        tests="tests/unit/brokers/ledger/test_delivery.py -k sqlite",
    ),
    # -- no success without confirmation
    Mutation(
        breaks="RabbitMQ: a message that is routed nowhere raises",
        part="brokers/rabbitmq",
        place=r"mandatory=True",
        mistake="mandatory=False",
        tests="tests/integration/test_rabbitmq_refusals.py -k nowhere_is_not_confirmed",
        server=RABBITMQ,
    ),
    Mutation(
        breaks="RabbitMQ: a publish that was refused raises",
        part="brokers/rabbitmq",
        place=r"\n +batch\.require_confirmed\([^\n]*",
        mistake="",
        tests="tests/integration/test_rabbitmq_operator.py",
        server=RABBITMQ,
    ),
    Mutation(
        breaks="Kafka: a record that was not written raises",
        part="brokers/kafka",
        place=r"\n    if failed:\n",
        mistake="\n    if not sent:\n",
        tests="tests/integration/test_kafka_faults.py",
        server=KAFKA,
    ),
    Mutation(
        breaks="the next try of a task sends what was not confirmed",
        part="hooks",
        place=r"return position < self\._seen and position not in self\._\w+",
        mistake="return position < self._seen",
        tests="tests/integration/test_rabbitmq_operator.py",
        server=RABBITMQ,
    ),
    # -- states
    Mutation(
        breaks="a dispatched message cannot be cancelled",
        part="domain",
        place=r"\(State\.SCHEDULED, Change\.CANCELLED\): State\.CANCELLED,",
        mistake=r"\g<0> (State.DISPATCHED, Change.CANCELLED): State.CANCELLED,",
        tests="tests/unit/domain",
    ),
    Mutation(
        breaks="a dead message can wait again",
        part="domain",
        place=r"\n +\(State\.DEAD, Change\.REQUEUED\): State\.SCHEDULED,",
        mistake="",
        tests="tests/unit/domain tests/unit/brokers/ledger",
    ),
    Mutation(
        breaks="a message that is being handed over cannot be cancelled",
        part="brokers/ledger",
        place=r"(allowed_from\(change\)\)\)),\n +_MESSAGE\.claimed_until_ms\.is_\(None\)",
        mistake=r"\1",
        tests="tests/unit/brokers/ledger tests/contract/test_ledger_held.py -k sqlite",
    ),
    # -- ids and concurrency
    Mutation(
        breaks="dispatchers do not wait for each other's rows",
        part="brokers/ledger",
        place=r"skip_locked=True",
        mistake="skip_locked=False",
        tests="tests/unit/brokers/ledger/test_claims.py -k does_not_wait_until",
        server=POSTGRES,
    ),
    Mutation(
        breaks="no message overtakes one of its key that another dispatcher takes",
        part="brokers/ledger",
        place=r"return \[seq for seq in seqs if seq not in left\]",
        mistake="return seqs",
        tests="tests/unit/brokers/ledger/test_claims.py -k overtake",
        server=POSTGRES,
    ),
    Mutation(
        breaks="the claim of a slow sender is renewed",
        part="brokers/ledger",
        place=r"ledger\.transact\(renew, [^\n]*",
        mistake="pass",
        tests="tests/unit/dispatcher/test_renewed_claims.py -k sqlite",
    ),
    Mutation(
        breaks="an idle dispatcher on PostgreSQL is woken",
        part="brokers/ledger",
        place=r"connection\.execute\(select\(func\.pg_notify\(CHANNEL, \"\"\)\)\)",
        mistake="pass",
        tests="tests/unit/dispatcher/test_notices.py -k soon_is_announced",
        server=POSTGRES,
    ),
    Mutation(
        breaks="an idle dispatcher on SQLite is woken",
        part="brokers/ledger",
        place=r"known = version\n +self\._on_notice\(\)",
        mistake="known = version",
        tests="tests/unit/dispatcher/test_notices.py -k soon_is_announced",
    ),
    Mutation(
        breaks="Kafka: the work of lost partitions is aborted",
        part="brokers/kafka/dispatch",
        place=r"(nothing may be committed, not even by a new membership.*\n +self\._drop_partitions\(\))\n.*\n.*",
        mistake=r"\1",
        tests="tests/unit/brokers/kafka/test_loop.py",
    ),
    Mutation(
        breaks="a task waits from before its messages were scheduled",
        part="operators",
        place=r"            since = confirmed\.since\n(            receipts = schedule_once.*\n)",
        mistake=r"\1            since = broker.journal_end()\n",
        tests="tests/unit/airflow/test_schedule_message_operator.py -k wait_begins",
    ),
    # -- what is shown
    Mutation(
        breaks="the journal is read in pages",
        part="brokers/ledger",
        place=r"connection\.execute\(query\.limit\(limit\)\)",
        mistake="connection.execute(query)",
        tests="tests/unit/brokers/ledger/test_delivery.py -k page_by_page",
    ),
    Mutation(
        breaks="overdue messages are shown",
        part="dispatcher",
        place=r"max\(0, now_ms - due_ms\.get\(hold, now_ms\)\) / 1000",
        mistake="0",
        tests="tests/unit/dispatcher/test_gauges.py -k overdue",
    ),
    Mutation(
        breaks="a loop that hangs is not well",
        part="dispatcher",
        place=r" and not self\.is_stalled",
        mistake="",
        tests="tests/unit/dispatcher/test_gauges.py -k does_not_end",
    ),
    Mutation(
        breaks="the dispatcher of the command line reports to Airflow's metrics",
        part="cli",
        place=r", observers=\[AirflowMetrics\(\)\]",
        mistake="",
        tests="tests/unit/airflow/test_metrics.py -k command_line",
    ),
    Mutation(
        breaks="the dispatcher of the command line connects Airflow's metrics",
        part="cli",
        place=r"connect_metrics\(\)\n(        service = Dispatcher)",
        mistake=r"pass\n\1",
        tests="tests/unit/airflow/test_metrics.py -k command_line",
    ),
    Mutation(
        breaks="an id that was dispatched is not scheduled again",
        part="brokers/ledger",
        place=r"_MESSAGE\.handled_count < statement\.excluded\.handled_count",
        mistake="_MESSAGE.handled_count <= statement.excluded.handled_count",
        tests="tests/contract/test_embedded.py -k sqlite",
    ),
    Mutation(
        breaks="replacing spares a message that was dispatched",
        part="brokers/ledger",
        place=r"waits = \(_MESSAGE\.state == State\.SCHEDULED\.value\) &",
        mistake="waits =",
        tests="tests/contract/test_embedded.py -k sqlite",
    ),
    # -- replay
    Mutation(
        breaks="only the messages that are named are replayed",
        part="brokers/ledger",
        place=r"if selection\.message_ids:(\n +conditions)",
        mistake=r"if selection.message_ids is None:\1",
        tests="tests/contract/test_embedded.py -k sqlite",
    ),
    Mutation(
        breaks="a replayed message leaves the dead-letter channel",
        part="brokers/ledger",
        place=r"\n +connection\.execute\(delete\(channel_message\).*(?=\n +journal\.append\(connection, Change\.REQ)",
        mistake="",
        tests="tests/unit/brokers/ledger/test_replay.py -k sqlite",
    ),
    Mutation(
        breaks="a replayed message starts with a handled count of 0",
        part="brokers/ledger",
        place=r"handled_count=0,(\n +generation)",
        mistake=r"\1",
        tests="tests/unit/brokers/ledger/test_replay.py -k sqlite",
    ),
    # -- Spark
    Mutation(
        breaks="an attempt is stored before it is submitted",
        part="operators",
        place=r"\n        self\._store\(context, history\)(\n        self\._hook = hook)",
        mistake=r"\1",
        tests="tests/unit/airflow/test_spark_operator.py -k stored_before",
    ),
    Mutation(
        breaks="a permanent failure is not retried",
        part="spark",
        place=r"if verdict is Verdict\.PERMANENT:",
        mistake="if verdict is None:",
        tests="tests/unit/spark",
    ),
    Mutation(
        breaks="the first submission counts as an attempt",
        part="spark",
        place=r"retries\.max_attempts - 1",
        mistake="retries.max_attempts",
        tests="tests/unit/spark",
    ),
    Mutation(
        breaks="a refused connection is a transient failure",
        part="spark/failures",
        place=r"(- name: connection-refused\n +verdict: )transient",
        mistake=r"\1permanent",
        tests="tests/unit/spark/failures",
    ),
    Mutation(
        breaks="an error of the statement is a permanent failure",
        part="spark/failures",
        place=r"(- name: statement-refused\n +verdict: )permanent",
        mistake=r"\1transient",
        tests="tests/unit/spark/failures",
    ),
    # -- limits and values
    Mutation(
        breaks="no retry comes sooner than the floor",
        part="domain",
        place=r"return self\.floor \+ \(",
        mistake="return (",
        tests="tests/unit/domain",
    ),
    Mutation(
        breaks="a time without a time zone is refused",
        part="domain",
        place=r"if moment\.tzinfo is None or moment\.utcoffset\(\) is None:",
        mistake="if moment is None:",
        tests="tests/unit/domain",
    ),
    Mutation(
        breaks="the rate limit counts what was dispatched",
        part="dispatcher",
        place=r"self\._tokens -= n\b",
        mistake="self._tokens -= 0",
        tests="tests/unit/dispatcher",
    ),
    Mutation(
        breaks="the password of the ledger is in no message",
        part="brokers/ledger",
        place=r"hide_password=True",
        mistake="hide_password=False",
        tests="tests/unit/brokers/ledger",
    ),
]


class CannotApplyError(Exception):
    """The place of a mutation is not there, or not the only one."""


def apply(mutation: Mutation, tree: Path) -> None:
    """Make the mistake in this copy."""
    matches = [
        (path, match)
        for path, text in _texts(tree / PACKAGE / mutation.part)
        for match in re.finditer(mutation.place, text)
    ]
    if len(matches) != 1:
        raise CannotApplyError(f"{mutation.place!r} matches {len(matches)} times in {mutation.part}")
    [(path, match)] = matches
    path.write_text(match.string[: match.start()] + match.expand(mutation.mistake) + match.string[match.end() :])


def _texts(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".yaml"):
            yield path, path.read_text()


def is_noticed(mutation: Mutation) -> bool:
    """Whether a test fails with the mistake, and none without it."""
    if _fails(mutation.tests):
        raise CannotApplyError(f"{mutation.tests} fails without any mistake")
    return _fails(mutation.tests, mutation)


@cache
def _fails(tests: str, mutation: Mutation | None = None) -> bool:
    with tempfile.TemporaryDirectory(prefix="delay-mutation-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        if mutation is not None:
            apply(mutation, tree)
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
        done = subprocess.run(
            [*command, *tests.split()],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
        )
    if done.returncode not in (0, TESTS_FAILED):
        raise CannotApplyError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    if done.returncode == 0 and not re.search(r"\b\d+ passed", done.stdout):
        raise CannotApplyError(f"no test ran:\n{done.stdout[-2000:]}")
    return done.returncode == TESTS_FAILED


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutations", description="Check that tests notice mistakes.")
    parser.add_argument("number", nargs="*", type=int, help="the mutations to try; default: all")
    parser.add_argument("--list", action="store_true", help="name the mutations and check that each has its place")
    options = parser.parse_args(arguments)
    chosen = options.number or range(1, len(MUTATIONS) + 1)
    failures = 0
    for number in chosen:
        mutation = MUTATIONS[number - 1]
        try:
            if options.list:
                result = _look_up(mutation)
            elif mutation.server and not os.environ.get(mutation.server):
                result = f"skipped: {mutation.server} is not set"
            else:
                result = "noticed" if is_noticed(mutation) else "SURVIVED"
        except CannotApplyError as error:
            result = f"ERROR: {error}"
        failures += result.startswith(("SURVIVED", "ERROR"))
        print(f"{number:>3} {mutation.breaks}: {result}", flush=True)
    return 1 if failures else 0


def _look_up(mutation: Mutation) -> str:
    with tempfile.TemporaryDirectory(prefix="delay-mutation-") as folder:
        part = Path(PACKAGE) / mutation.part
        shutil.copytree(ROOT / part, Path(folder) / part)
        apply(mutation, Path(folder))
    return mutation.tests


if __name__ == "__main__":
    sys.exit(main())
