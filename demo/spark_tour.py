"""The second part of the tour: a Spark job whose source is down comes back by itself, and holds nothing meanwhile."""

from __future__ import annotations

from typing import Any

import psutil

from airflow_delay_provider.brokers.embedded import EmbeddedBroker
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.ledger import listing
from airflow_delay_provider.ledger.records import MessageRecord
from airflow_delay_provider.spark.attempt_table import attempt_table
from airflow_delay_provider.spark.history import HISTORY_KEY, History
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL
from demo.source import source_of_orders, source_url
from demo.voice import Voice
from tests.servers.airflow import Airflow
from tests.servers.airflow_api import AirflowApi
from tests.servers.process import free_port

SPARK_DAG = "example_spark"
TASK = "count_orders"
#: Spark in the process of the driver alone.
CONNECTIONS = {"spark_local": '{"conn_type": "spark", "host": "local[1]"}'}
#: For each step, in which a JVM may have to start on a busy machine.
STEP_SECONDS = 180
ENDED = frozenset({"success", "failed"})


class SparkTour:
    """Follows one run of the example with Spark."""

    def __init__(self, airflow: Airflow, api: AirflowApi, broker: EmbeddedBroker, voice: Voice) -> None:
        self.airflow = airflow
        self.api = api
        self.broker = broker
        self.voice = voice
        self.port = free_port()
        self.run_id = ""

    def begin(self) -> None:
        """Start the run, which takes a while to fail."""
        self.api.wait_for_dag(SPARK_DAG)
        self.run_id = self.api.trigger(SPARK_DAG, {"source": source_url(self.port)})
        self.voice.say(f"started DAG {SPARK_DAG}: run {self.run_id}; nobody answers at {source_url(self.port)}")

    def follow(self) -> None:
        """Raise when a step does not happen in time."""
        self._see_job_fail()
        self._see_nothing_held()
        ticket = self._find_ticket()
        with source_of_orders(self.port):
            self.voice.say("the source of orders is up now")
            self.broker.expedite([ticket.message.id])
            self.voice.say("the ticket is expedited, as `airflow delay retries --expedite` does, to save the wait")
            self._see_job_succeed()

    def _see_job_fail(self) -> None:
        self._wait_for_task(frozenset({"deferred"}))
        self.voice.say("the Spark job has failed, and what made it fail may pass:")
        self._show_attempts()

    def _see_nothing_held(self) -> None:
        def no_worker_busy() -> dict[str, Any] | None:
            pool = self.api.pool()
            return pool if pool["deferred_slots"] == 1 and pool["occupied_slots"] == 0 else None

        what = "the Spark task is deferred and no task takes a worker slot"
        pool = self.airflow.wait_for(no_worker_busy, what=what, seconds=STEP_SECONDS)
        processes = count_processes(source_url(self.port))
        self.voice.say(
            f"task {TASK} is deferred; worker slots taken: {pool['occupied_slots']} of {pool['slots']};"
            f" processes of its job: {processes}"
        )
        if processes:
            raise RuntimeError(f"{processes} processes of the job run on although it has failed")

    def _find_ticket(self) -> MessageRecord:
        with self.broker.ledger.read() as connection:
            [ticket] = listing.page(connection, channel=DEFAULT_CHANNEL, states=[State.SCHEDULED]).records
        self.voice.say(
            f"ticket {ticket.message.id} brings attempt 2 at {ticket.message.deliver_at:%H:%M:%S} UTC;"
            f" its page: {self.airflow.url}/delay/messages/{ticket.message.id}"
        )
        return ticket

    def _see_job_succeed(self) -> None:
        task = self._wait_for_task(ENDED)
        if task["state"] != "success":
            raise RuntimeError(f"task {TASK} of {SPARK_DAG} ended as {task['state']}")
        self._show_attempts()
        counted = [line for line in self._log_lines() if line.startswith("orders ")]
        self.voice.say(f"attempt 2 has succeeded in the same try of the task: {', '.join(counted)}")
        self.voice.say(
            f"in the UI ({self.airflow.url}/dags/{SPARK_DAG}) the task's log has this table, its Storage tab the"
            " attempts, and its button Delayed message leads to the ticket"
        )

    def _wait_for_task(self, states: frozenset[str]) -> dict[str, Any]:
        found = self.api.wait_for_task(SPARK_DAG, self.run_id, TASK, states | ENDED, seconds=STEP_SECONDS)
        if found["state"] not in states:
            raise RuntimeError(f"task {TASK} of {SPARK_DAG} is {found['state']}")
        return found

    def _show_attempts(self) -> None:
        path = f"/api/v2/dags/{SPARK_DAG}/dagRuns/{self.run_id}/taskInstances/{TASK}/state-store/{HISTORY_KEY}"
        history = History.from_json(self.api.get(path)["value"])
        self.voice.show("\n".join(f"          {line}" for line in attempt_table(history)))

    def _log_lines(self) -> list[str]:
        """Return what the job printed, without what Airflow puts before each line."""
        lines = (str(line.get("event", "")) for line in self.api.log(SPARK_DAG, self.run_id, TASK))
        return [line.partition("- ")[2] or line for line in lines]


def count_processes(mark: str) -> int:
    """Return how many processes have ``mark`` among their arguments, as spark-submit, its JVM and Python have."""
    return sum(mark in (each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))
