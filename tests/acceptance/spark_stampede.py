"""Many Spark tasks fail together because the master is down, and all are retried when it is back.

``python -m tests.acceptance.spark_stampede --tasks 200`` runs it in an Airflow of its own and prints what it saw. Each
task's spark-submit is a light one that asks the real master: hundreds of JVMs would measure the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from airflow_delay_provider.spark.process import guard
from tests.acceptance.runs import Run
from tests.databases import fresh_database
from tests.sparks import connection_of, private_cluster, running_with
from tools.servers.airflow import Airflow, AirflowConfig
from tools.servers.airflow_api import AirflowApi
from tools.servers.component import wait_for
from tools.servers.spark import SparkCluster

ROOT = Path(__file__).parents[2]
DAG_ID = "spark_stampede"
#: The token bucket of the Airflow under test.
PER_SECOND, BURST = 2.0, 4
SETTINGS = {
    "delay": {"spark_submissions_per_second": str(PER_SECOND), "spark_submission_burst": str(BURST)},
    # A triggerer that was killed is given up after 30 s by default; its successor waits for that.
    "triggerer": {"triggerer_health_check_threshold": "10", "job_heartbeat_sec": "2"},
}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The observations of a run."""

    tasks: int
    succeeded: int
    #: Submissions while the master was down, and after.
    submissions_down: int
    submissions_up: int
    #: Jobs that ran twice at the same time.
    overlaps: list[str]
    #: Jobs that were done more than once.
    repeated: list[str]
    most_in_one_second: int
    most_in_ten_seconds: int
    seconds_from_back_to_all_done: float
    workers_killed: int

    @property
    def is_within_bucket(self) -> bool:
        return self.most_in_one_second <= BURST + PER_SECOND and self.most_in_ten_seconds <= BURST + 10 * PER_SECOND


def stampede(
    airflow: Airflow, api: AirflowApi, cluster: SparkCluster, folder: Path, *, tasks: int, kills: int, seconds: float
) -> Figures:
    """Run it; a worker is killed ``kills`` times and the triggerer once while jobs are retried."""
    cluster.kill_worker()
    cluster.kill_master()
    api.wait_for_dag(DAG_ID)
    run = Run(api, DAG_ID, api.trigger(DAG_ID, {"folder": str(folder), "tasks": tasks}))
    wait_for(lambda: _count(api, run, "deferred") == tasks, what="all tasks wait", seconds=seconds, interval=1)
    back = time.time()
    cluster.start_master()
    cluster.start_worker()
    wait_for(lambda: len(_lines(folder, "ended")) >= tasks // 4, what="a quarter is done", seconds=seconds)
    airflow.components["triggerer"].kill()
    airflow.components["triggerer"].start()
    for _ in range(kills):
        _kill_a_worker(folder)
    api.wait_for_run(DAG_ID, run.run_id, seconds=seconds)
    return _judge(folder, tasks=tasks, succeeded=_count(api, run, "success") - 1, back=back, killed=kills)


def _kill_a_worker(folder: Path) -> None:
    """Kill -9 the process of a task while its job runs; jobs that begin meanwhile do not end before that."""
    before = len(_lines(folder, "held"))

    def kill_one() -> bool:
        held = _lines(folder, "held")[before:]
        for each in running_with(str(folder)):
            with contextlib.suppress(psutil.NoSuchProcess):
                command, parent = each.cmdline(), each.parent()
                if parent is not None and guard.__file__ in command and command[-1] in held:
                    parent.kill()
                    each.wait(timeout=60)  # it ends the job
                    return True
        return False

    (folder / "hold").touch()
    try:
        wait_for(kill_one, what="a job runs", seconds=240)
    finally:
        (folder / "hold").unlink()


def _judge(folder: Path, *, tasks: int, succeeded: int, back: float, killed: int) -> Figures:
    at = sorted(float(line.split()[1]) for line in _lines(folder, "submissions"))
    after = [moment for moment in at if moment >= back]
    done = Counter(line.split()[0] for line in _lines(folder, "ended"))
    last = max((float(line.split()[1]) for line in _lines(folder, "ended")), default=back)
    return Figures(
        tasks=tasks,
        succeeded=succeeded,
        submissions_down=len(at) - len(after),
        submissions_up=len(after),
        overlaps=_lines(folder, "overlaps"),
        repeated=sorted(name for name, times in done.items() if times > 1),
        most_in_one_second=_most_within(after, 1.0),
        most_in_ten_seconds=_most_within(after, 10.0),
        seconds_from_back_to_all_done=round(last - back, 1),
        workers_killed=killed,
    )


def _most_within(moments: Sequence[float], seconds: float) -> int:
    return max((sum(start <= each < start + seconds for each in moments) for start in moments), default=0)


def _lines(folder: Path, name: str) -> list[str]:
    file = folder / name
    return file.read_text().splitlines() if file.exists() else []


def _count(api: AirflowApi, run: Run, state: str) -> int:
    path = f"/api/v2/dags/{run.dag_id}/dagRuns/{run.run_id}/taskInstances"
    return int(api.get(path, state=state, limit=1)["total_entries"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--parallelism", type=int, default=8)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="delay-stampede-") as folder,
        private_cluster(Path(folder)) as cluster,
        fresh_database() as database_url,
        fresh_database() as ledger_url,
    ):
        config = AirflowConfig(
            dags={"acceptance": ROOT / "tests" / "acceptance" / "dags"},
            database_url=database_url,
            ledger_url=ledger_url,
            parallelism=args.parallelism,
            connections={"spark_standalone": json.dumps(connection_of(cluster))},
            python_path=[ROOT],
            settings=SETTINGS,
        )
        with Airflow(Path(folder), config) as airflow:
            airflow.prepare()
            airflow.start()
            with airflow.api() as api:
                figures = stampede(
                    airflow, api, cluster, Path(folder), tasks=args.tasks, kills=args.kills, seconds=1800
                )
    print(json.dumps(asdict(figures)))
    good = figures.succeeded == figures.tasks and not figures.overlaps and figures.is_within_bucket
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
