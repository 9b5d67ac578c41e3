"""Tasks that fail after the broker has confirmed, killed executors and speculation, on a cluster."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.databases import fresh_database
from tests.integration.pipeline.targets import Target, serving, target_of
from tests.kafkas import require_kafka
from tests.rabbits import require_rabbitmq
from tests.sparks import CONF, JOBS
from tools.servers.spark import SparkCluster, client_environment

ROWS = 400
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
class Written:
    """What a write with a fault has left."""

    #: How often each payload arrived, by number of its row, and under which ids.
    payloads: Counter[int]
    ids: dict[int, set[str]]
    report: dict[str, Any]


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
                    place |= {"url": require_kafka() if broker == "kafka" else require_rabbitmq()}
                place["channel"] = target.channel
                options = {**target.options, "report": str(folder / f"{broker}-{fault}.json"), "batchSize": "100"}
                plan.append(
                    {
                        "options": options,
                        "rows": ROWS * partitions,
                        "partitions": partitions,
                        "fault": fault,
                        "confirmed": place,
                    }
                )
                targets[broker, fault] = target
        (folder / "plan.json").write_text(json.dumps(plan))
        submit(cluster, JOBS / "schedule_with_faults.py", folder / "plan.json", trap=folder / "trap")
        yield {
            (broker, fault): written(target, ROWS * FAULTS[fault], folder / f"{broker}-{fault}.json")
            for (broker, fault), target in targets.items()
        }


def submit(cluster: SparkCluster, job: Path, plan: Path, *, trap: Path) -> None:
    settings = {**SETTINGS, "spark.executorEnv.PYTHONPATH": str(trap)}
    command = ["spark-submit", "--master", cluster.url]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    done = subprocess.run(
        [*command, str(job), str(plan)],
        env={**os.environ, **client_environment()},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def written(target: Target, rows: int, report: Path) -> Written:
    payloads, ids = Counter[int](), dict[int, set[str]]()
    for message in target.received(rows):
        number = int(message.payload.split()[0])
        payloads[number] += 1
        ids.setdefault(number, set()).add(message.id)
    return Written(payloads=payloads, ids=ids, report=json.loads(report.read_text()))


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
        # Those that the failed task had scheduled.
        assert found.report["outcomes"]["kept"] >= (100 if fault != "slow" else 0)
    elif fault != "slow":
        assert 100 <= again <= 200
    else:
        assert 0 <= again <= 200
    print(f"{broker}, {fault}: {rows} rows, {again} messages twice")
