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

from airflow_delay_provider.links import UI_ROUTE  # noqa: E402
from demo.java import find_java_home  # noqa: E402 - found on the path set above
from demo.report import Report  # noqa: E402
from demo.spark_tour import CONNECTIONS, SPARK_DAG  # noqa: E402
from demo.tour import DEMO_DAG, Tour  # noqa: E402
from tools.servers.airflow import Airflow, AirflowConfig  # noqa: E402
from tools.servers.component import ComponentDiedError  # noqa: E402
from tools.servers.server import UnavailableError  # noqa: E402

#: Schedules many messages.
TRAFFIC_DAG = "example_traffic"
#: Leaves a dead letter.
CONSUME_DAG = "example_consume"
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
        if command == "demo":
            Tour(airflow, report, with_spark=has_java).run()
        else:
            keep_up(airflow, report, with_spark=has_java)
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


def keep_up(airflow: Airflow, report: Report, *, with_spark: bool) -> None:
    fill_pages(airflow, report, with_spark=with_spark)
    report.show(
        f"""
Airflow           {airflow.url}  (no login; this machine only)
Delayed messages  {airflow.url}/plugin/{UI_ROUTE}  (also in the navigation, and a tab of each task instance)
Spark retries     {airflow.url}/plugin/{UI_ROUTE}/retries  (the source of DAG {SPARK_DAG} is down: its job fails)
HTTP API          {airflow.url}/delay/v1/messages
dispatcher        {airflow.dispatcher_url}/health
metrics           {airflow.dispatcher_url}/metrics

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


def fill_pages(airflow: Airflow, report: Report, *, with_spark: bool) -> None:
    """Run the DAGs that give the pages something to show."""
    runs: dict[str, dict[str, object]] = {TRAFFIC_DAG: {}, CONSUME_DAG: {}, DEMO_DAG: {"seconds": 60}}
    if with_spark:
        runs[SPARK_DAG] = {}
    with airflow.api() as api:
        for dag_id, conf in runs.items():
            api.wait_for_dag(dag_id)
            api.trigger(dag_id, conf)
    report.step(f"started {', '.join(runs)}, so that there is something to see")


def leave(signum: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
