"""`./dev demo` and `./dev up`: run a real Airflow with SQLite and the embedded broker."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from demo.java import find_java_home  # noqa: E402 - found on the path set above
from demo.report import Report  # noqa: E402
from demo.spark_tour import CONNECTIONS, SPARK_DAG  # noqa: E402
from demo.tour import DEMO_DAG, Tour  # noqa: E402
from tools.servers.airflow import Airflow, AirflowConfig  # noqa: E402
from tools.servers.component import ComponentDiedError  # noqa: E402
from tools.servers.server import UnavailableError  # noqa: E402

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(command: str) -> int:
    if command not in ("demo", "up"):
        sys.stderr.write("usage: python demo/run.py demo|up\n")
        return 2
    for signum in STOP_SIGNALS:
        signal.signal(signum, leave)
    run_dir = ROOT / ".run" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{command}-{os.getpid()}"
    report = Report()
    report.step(f"all files of this run are in {run_dir.relative_to(ROOT)}, its logs in the subfolder logs")
    has_java = prepare_spark(run_dir, report)
    config = AirflowConfig(dags={"examples": ROOT / "dags"}, parallelism=3, connections=CONNECTIONS)
    airflow = Airflow(run_dir, config)
    try:
        start(airflow, report)
        Tour(airflow, report, with_spark=has_java).run() if command == "demo" else keep_up(airflow, report)
    except (ComponentDiedError, RuntimeError, TimeoutError) as error:
        report.fail(f"{error}\nall logs: {airflow.log_dir}")
        return 1
    finally:
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)  # stopping takes a limited time: let it finish
        report.step("stopping all components")
        airflow.stop()
    report.step("done")
    return 0


def prepare_spark(run_dir: Path, report: Report) -> bool:
    """Set the environment variables that Spark tasks inherit; return whether Java is available."""
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    try:
        os.environ["JAVA_HOME"] = str(find_java_home(run_dir))
    except UnavailableError:
        report.step("skipping Spark, because Java 17 is missing: apt-get install openjdk-17-jre-headless")
        return False
    return True


def start(airflow: Airflow, report: Report) -> None:
    report.step("creating Airflow's database and the ledger (SQLite)")
    airflow.prepare()
    report.step("starting API server, DAG processor, triggerer, scheduler and dispatcher")
    airflow.start()
    report.step("all components are healthy")


def keep_up(airflow: Airflow, report: Report) -> None:
    with airflow.api() as api:
        api.wait_for_dag(DEMO_DAG)
        api.trigger(DEMO_DAG, {"seconds": 60})
    report.show(
        f"""
Airflow        {airflow.url}  (no login; this machine only)
messages       {airflow.url}/dags/{DEMO_DAG}  (a run is on its way)
Spark retries  {airflow.url}/dags/{SPARK_DAG}  (trigger it: its source is down, so the job fails and is retried;
               see the task's log, all attempts in its Storage tab, and the page behind "Delayed message")
dispatcher     {airflow.dispatcher_url}/health
metrics        {airflow.dispatcher_url}/metrics

Try these commands in another terminal, in this folder:
  export AIRFLOW_HOME={airflow.home}
  .venv/bin/airflow delay status
  .venv/bin/airflow delay list --channel reminders
  .venv/bin/airflow delay schedule reminders --payload 'Tea is ready' --after 30
  .venv/bin/airflow delay consume reminders --limit 1
  .venv/bin/airflow delay retries
  .venv/bin/airflow delay retries --dag-id {SPARK_DAG} --expedite
Start the source of the Spark job, so that its next attempt succeeds:
  echo '{{"id": 1, "state": "paid"}}' > /tmp/orders.jsonl
  .venv/bin/python -m http.server 8799 --bind 127.0.0.1 --directory /tmp

Press Ctrl-C to stop everything."""
    )
    while True:
        for component in airflow.all_components:
            component.require_alive()
        time.sleep(1)


def leave(signum: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
