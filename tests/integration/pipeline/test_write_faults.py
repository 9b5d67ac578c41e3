"""Tasks that fail after the broker has confirmed, killed executors and speculation, on a cluster."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from airflow_delay_provider.brokers.port import HasTopology
from tests.databases import fresh_database
from tests.integration.pipeline.targets import Target, serving, target_of
from tests.kafkas import require_kafka
from tests.rabbits import require_rabbitmq
from tests.sparks import CONF, JOBS
from tools.servers.spark import SparkCluster, client_environment

#: One application meets all faults; a busy machine takes minutes for it.
pytestmark = pytest.mark.timeout(900)
SUBMIT_SECONDS = 800

ROWS = 1200
#: Rows that the failing task may have scheduled.
BEFORE = 600
#: What the first task meets, and the number of tasks.
FAULTS = {"raise": 1, "kill": 1, "slow": 4}
BROKERS = ("postgresql", "rabbitmq", "kafka")
SETTINGS = {
    **CONF,
    "spark.cores.max": "2",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "500ms",
}
#: An Airflow that cannot be imported: where it stands, executors prove that they do not need it.
NO_AIRFLOW = 'raise ImportError("an executor has imported Airflow")'


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How an attempt of a task ended, as Spark's event log has it."""

    task: int
    number: int
    is_speculative: bool
    end: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a write with a fault has left."""

    #: How often each payload arrived, by number of its row, and under which ids.
    payloads: Counter[int]
    ids: dict[int, set[str]]
    report: dict[str, Any]
    #: Ended attempts of all tasks.
    attempts: list[Attempt]


@pytest.fixture(scope="module")
def writes(
    cluster: SparkCluster,
    tmp_path_factory: pytest.TempPathFactory,
    migrated_postgres: str,
    request: pytest.FixtureRequest,
) -> Iterator[dict[tuple[str, str], Written]]:
    """The results of one application that meets every fault on every broker."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "trap/airflow").mkdir(parents=True)
    (folder / "trap/airflow/__init__.py").write_text(NO_AIRFLOW)
    with ExitStack() as stack:
        targets: dict[tuple[str, str], Target] = {}
        plan = []
        for broker in BROKERS:
            for fault, partitions in FAULTS.items():
                place = {"broker": broker}
                if broker == "postgresql":
                    place["url"] = stack.enter_context(fresh_database(template=migrated_postgres))
                    connection = {"conn_type": "delay", "extra": {"ledger_url": place["url"]}}
                    target = target_of(broker, folder, connection, "orders")
                else:
                    target = stack.enter_context(serving(broker, folder, request))
                    # A new ladder takes its time, which is not what is tested here.
                    with target.open() as opened:
                        assert isinstance(opened, HasTopology)
                        opened.require_topology()
                    place |= {"url": require_kafka() if broker == "kafka" else require_rabbitmq()}
                place["channel"] = target.channel
                options = {**target.options, "report": str(folder / f"{broker}-{fault}.json"), "batchSize": "100"}
                plan.append(
                    {
                        "name": f"{broker}-{fault}",
                        "options": options,
                        "rows": ROWS * partitions,
                        "partitions": partitions,
                        "fault": fault,
                        "confirmed": place,
                        "met": str(folder / f"{broker}-{fault}-met"),
                    }
                )
                targets[broker, fault] = target
        (folder / "plan.json").write_text(json.dumps(plan))
        (folder / "events").mkdir()
        submit(cluster, folder)
        attempts = attempts_by_write(folder / "events")
        yield {
            (broker, fault): written(target, ROWS * FAULTS[fault], folder / f"{broker}-{fault}.json", attempts)
            for (broker, fault), target in targets.items()
        }


def submit(cluster: SparkCluster, folder: Path) -> None:
    settings = {
        **SETTINGS,
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (folder / "events").as_uri(),
        "spark.executorEnv.PYTHONPATH": str(folder / "trap"),
    }
    command = ["spark-submit", "--master", cluster.url]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    done = subprocess.run(
        [*command, str(JOBS / "schedule_with_faults.py"), str(folder / "plan.json")],
        env={**os.environ, **client_environment()},
        capture_output=True,
        text=True,
        timeout=SUBMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "on executors: ['an executor has imported Airflow']" in done.stdout


def attempts_by_write(folder: Path) -> dict[str, list[Attempt]]:
    """Return the attempts in an event log, by the description of their Spark jobs."""
    lines = (line for file in sorted(folder.rglob("events_*")) for line in file.read_text().splitlines())
    names, attempts = dict[int, str](), defaultdict[str, list[Attempt]](list)
    for event in map(json.loads, lines):
        match event["Event"]:
            case "SparkListenerJobStart":
                names |= dict.fromkeys(event["Stage IDs"], event["Properties"].get("spark.job.description", ""))
            case "SparkListenerTaskEnd":
                task = event["Task Info"]
                attempt = Attempt(
                    task=task["Index"],
                    number=task["Attempt"],
                    is_speculative=task["Speculative"],
                    end=event["Task End Reason"],
                )
                attempts[names[event["Stage ID"]]].append(attempt)
    return attempts


def written(target: Target, rows: int, report: Path, attempts: Mapping[str, list[Attempt]]) -> Written:
    payloads, ids = Counter[int](), dict[int, set[str]]()
    for message in target.received(rows):
        number = int(message.payload.split()[0])
        payloads[number] += 1
        ids.setdefault(number, set()).add(message.id)
    return Written(payloads=payloads, ids=ids, report=json.loads(report.read_text()), attempts=attempts[report.stem])


@pytest.mark.parametrize("broker", BROKERS)
def test_each_fault_happens_as_planned(broker: str, writes: dict[tuple[str, str], Written]):
    """Without this, a first task that fails for any other reason would look the same."""
    [raised] = failed_attempts(writes[broker, "raise"])
    assert raised.end["Reason"] == "ExceptionFailure"
    assert "the source is broken for a moment" in raised.end["Description"] + raised.end["Full Stack Trace"]
    [killed] = failed_attempts(writes[broker, "kill"])
    assert killed.end["Reason"] == "ExecutorLostFailure"
    assert (killed.task, killed.number) == (0, 0)
    assert failed_attempts(writes[broker, "slow"]) == []
    copies = [attempt for attempt in writes[broker, "slow"].attempts if attempt.is_speculative]
    assert [(copy.task, copy.number, copy.end["Reason"]) for copy in copies] == [(0, 1, "Success")]


def failed_attempts(found: Written) -> list[Attempt]:
    """Return those that neither succeeded nor were ended because a copy succeeded."""
    return [attempt for attempt in found.attempts if attempt.end["Reason"] not in ("Success", "TaskKilled")]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("broker", BROKERS)
def test_no_row_is_lost_and_a_repeated_one_has_the_same_id(
    broker: str, fault: str, writes: dict[tuple[str, str], Written]
):
    found, rows = writes[broker, fault], ROWS * FAULTS[fault]
    assert found.payloads.keys() == set(range(rows))
    assert {len(ids) for ids in found.ids.values()} == {1}
    assert len({next(iter(ids)) for ids in found.ids.values()}) == rows
    assert found.report["rows"] == rows
    again = found.payloads.total() - rows
    if broker == "postgresql":
        assert again == 0
        # Those that the first attempt had scheduled.
        assert 100 <= found.report["outcomes"]["kept"] <= BEFORE
    else:
        assert 100 <= again <= BEFORE
    print(f"{broker}, {fault}: {rows} rows, {again} messages twice")
