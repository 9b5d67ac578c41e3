"""The second part of the demo: a Spark job fails because its source is down, and is retried without a worker slot."""

from __future__ import annotations

from typing import Any

import psutil

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.records import MessageRecord
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.spark.retries import HISTORY_KEY, History, attempt_table
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL
from demo.orders_server import orders_server, orders_url
from demo.report import Report
from tools.servers.airflow import Airflow
from tools.servers.airflow_api import AirflowApi
from tools.servers.process import free_port

SPARK_DAG = "example_spark"
TASK = "count_orders"
#: Spark in the driver's process, without a cluster.
CONNECTIONS = {"spark_local": '{"conn_type": "spark", "host": "local[1]"}'}
#: Time limit of each step: a JVM may have to start on a busy machine.
STEP_SECONDS = 180
FINAL_STATES = frozenset({"success", "failed"})


class SparkTour:
    """Follows one run of the Spark example."""

    def __init__(self, airflow: Airflow, api: AirflowApi, broker: EmbeddedBroker, report: Report) -> None:
        self.airflow = airflow
        self.api = api
        self.broker = broker
        self.report = report
        self.port = free_port()
        self.run_id = ""

    def begin(self) -> None:
        """Start the DAG run; its job takes a while to fail."""
        self.api.wait_for_dag(SPARK_DAG)
        self.run_id = self.api.trigger(SPARK_DAG, {"source": orders_url(self.port)})
        self.report.step(f"started DAG {SPARK_DAG}: run {self.run_id}; nothing listens at {orders_url(self.port)}")

    def follow(self) -> None:
        """Raise if a step does not happen in time."""
        self._see_job_fail()
        self._see_nothing_held()
        ticket = self._find_ticket()
        with orders_server(self.port):
            self.report.step("started the source of the orders")
            self.broker.expedite([ticket.message.id])
            self.report.step("expedited the ticket, as `airflow delay retries --expedite` does, to save time")
            self._see_job_succeed()

    def _see_job_fail(self) -> None:
        self._wait_for_task(frozenset({"deferred"}))
        self.report.step("the Spark job failed with an error that may pass:")
        self._show_attempts()

    def _see_nothing_held(self) -> None:
        def no_worker_busy() -> dict[str, Any] | None:
            pool = self.api.pool()
            return pool if pool["deferred_slots"] == 1 and pool["occupied_slots"] == 0 else None

        what = "the Spark task is deferred and no worker slot is taken"
        pool = self.airflow.wait_for(no_worker_busy, what=what, seconds=STEP_SECONDS)
        processes = count_processes(orders_url(self.port))
        self.report.step(
            f"task {TASK} is deferred; worker slots taken: {pool['occupied_slots']} of {pool['slots']};"
            f" processes of its job: {processes}"
        )
        if processes:
            raise RuntimeError(f"{processes} processes of the failed job are still running")

    def _find_ticket(self) -> MessageRecord:
        with self.broker.ledger.read() as connection:
            [ticket] = listing.page(connection, channel=DEFAULT_CHANNEL, states=[State.SCHEDULED]).records
        self.report.step(
            f"ticket {ticket.message.id} brings attempt 2 at {ticket.message.deliver_at:%H:%M:%S} UTC;"
            f" its page: {self.airflow.url}/plugin/delayed-messages/messages/{ticket.message.id}"
        )
        return ticket

    def _see_job_succeed(self) -> None:
        task = self._wait_for_task(FINAL_STATES)
        if task["state"] != "success":
            raise RuntimeError(f"task {TASK} of {SPARK_DAG} ended as {task['state']}")
        self._show_attempts()
        counted = [line for line in self._log_lines() if line.startswith("orders ")]
        self.report.step(f"attempt 2 has succeeded in the same try of the task: {', '.join(counted)}")
        self.report.step(
            f"in the UI ({self.airflow.url}/dags/{SPARK_DAG}) see this table in the task's log, the attempts in its"
            " Storage tab, and the ticket behind its button Delayed message"
        )

    def _wait_for_task(self, states: frozenset[str]) -> dict[str, Any]:
        found = self.api.wait_for_task(SPARK_DAG, self.run_id, TASK, states | FINAL_STATES, seconds=STEP_SECONDS)
        if found["state"] not in states:
            raise RuntimeError(f"task {TASK} of {SPARK_DAG} is {found['state']}")
        return found

    def _show_attempts(self) -> None:
        path = f"/api/v2/dags/{SPARK_DAG}/dagRuns/{self.run_id}/taskInstances/{TASK}/state-store/{HISTORY_KEY}"
        history = History.from_json(self.api.get(path)["value"])
        self.report.show("\n".join(f"          {line}" for line in attempt_table(history)))

    def _log_lines(self) -> list[str]:
        """Return the output of the job without Airflow's prefixes."""
        lines = (str(line.get("event", "")) for line in self.api.log(SPARK_DAG, self.run_id, TASK))
        return [line.partition("- ")[2] or line for line in lines]


def count_processes(mark: str) -> int:
    """Return how many processes have ``mark`` as an argument: spark-submit, its JVM and Python do."""
    return sum(mark in (each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))
