"""`./dev demo` and `./dev up`: a real Airflow with SQLite and the embedded broker, and messages on their way."""

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
from demo.spark_tour import CONNECTIONS, SPARK_DAG  # noqa: E402
from demo.tour import DEMO_DAG, Tour  # noqa: E402
from demo.voice import Voice  # noqa: E402
from tests.servers.airflow import Airflow, AirflowConfig  # noqa: E402
from tests.servers.component import ComponentDiedError  # noqa: E402
from tests.servers.server import UnavailableError  # noqa: E402

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(command: str) -> int:
    if command not in ("demo", "up"):
        sys.stderr.write("usage: python demo/run.py demo|up\n")
        return 2
    for signum in STOP_SIGNALS:
        signal.signal(signum, leave)
    run_dir = ROOT / ".run" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{command}-{os.getpid()}"
    voice = Voice()
    voice.say(f"everything of this run is in {run_dir.relative_to(ROOT)}, the logs in its folder logs")
    has_java = prepare_spark(run_dir, voice)
    config = AirflowConfig(dags={"examples": ROOT / "dags"}, parallelism=3, connections=CONNECTIONS)
    airflow = Airflow(run_dir, config)
    try:
        start(airflow, voice)
        Tour(airflow, voice, with_spark=has_java).run() if command == "demo" else keep_up(airflow, voice)
    except (ComponentDiedError, RuntimeError, TimeoutError) as error:
        voice.fail(f"{error}\nall logs: {airflow.log_dir}")
        return 1
    finally:
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)  # stopping is bounded in time: let it finish
        voice.say("stopping all components")
        airflow.stop()
    voice.say("done")
    return 0


def prepare_spark(run_dir: Path, voice: Voice) -> bool:
    """Say in the environment, which tasks inherit, where Spark finds what it needs; return whether there is a Java."""
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    try:
        os.environ["JAVA_HOME"] = str(find_java_home(run_dir))
    except UnavailableError:
        voice.say("no Java 17 here and none to be had, so Spark is left out: apt-get install openjdk-17-jre-headless")
        return False
    return True


def start(airflow: Airflow, voice: Voice) -> None:
    voice.say("creating Airflow's database and the ledger (SQLite)")
    airflow.prepare()
    voice.say("starting api-server, dag-processor, triggerer, scheduler, and the dispatcher")
    airflow.start()
    voice.say("all components are healthy")


def keep_up(airflow: Airflow, voice: Voice) -> None:
    with airflow.api() as api:
        api.wait_for_dag(DEMO_DAG)
        api.trigger(DEMO_DAG, {"seconds": 60})
    voice.show(
        f"""
Airflow        {airflow.url}  (no login; this machine only)
a run to see   {airflow.url}/dags/{DEMO_DAG}
dispatcher     {airflow.dispatcher_url}/health
metrics        {airflow.dispatcher_url}/metrics
a Spark job    {airflow.url}/dags/{SPARK_DAG}  (trigger it: its source is down, so it fails, waits and comes back;
               see the task's log, its Storage tab with all attempts, and the page behind "Delayed message")

In another terminal, in this folder:
  export AIRFLOW_HOME={airflow.home}
  .venv/bin/airflow delay status
  .venv/bin/airflow delay list --channel reminders
  .venv/bin/airflow delay schedule reminders --payload 'Tea is ready' --after 30
  .venv/bin/airflow delay consume reminders --limit 1
  .venv/bin/airflow delay retries
  .venv/bin/airflow delay retries --dag-id {SPARK_DAG} --expedite
The source of the Spark job, to bring it up:
  echo '{{"id": 1, "state": "paid"}}' > /tmp/orders.jsonl
  .venv/bin/python -m http.server 8799 --bind 127.0.0.1 --directory /tmp

Ctrl-C ends it all."""
    )
    while True:
        for component in airflow.all_components:
            component.require_alive()
        time.sleep(1)


def leave(signum: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
