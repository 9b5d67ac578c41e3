"""The third part of the demo: Spark schedules the rows of a Parquet file, and reports how late the messages were."""

from __future__ import annotations

import json
from pathlib import Path

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.lifecycle import State
from demo.report import Report
from tools.servers.airflow import Airflow
from tools.servers.airflow_api import AirflowApi

BULK_DAG, LATENESS_DAG = "example_bulk_schedule", "lateness_report"
CHANNEL = "bulk"
#: After they are scheduled, the rows of the file are due in this time.
DUE_SECONDS = 5
#: Time limit of each step: a JVM may have to start on a busy machine.
STEP_SECONDS = 240


class PipelineTour:
    """Follows one run of each DAG of the data pipeline."""

    def __init__(self, airflow: Airflow, api: AirflowApi, broker: EmbeddedBroker, report: Report) -> None:
        self.airflow = airflow
        self.api = api
        self.broker = broker
        self.report = report
        self.folder = airflow.home.parent / "pipeline"

    def follow(self) -> None:
        """Raise if a step does not happen in time."""
        scheduled = self._schedule_rows()
        self._see_messages_dispatched(scheduled)
        self._report_lateness()

    def _schedule_rows(self) -> int:
        conf = {"folder": str(self.folder), "channel": CHANNEL, "seconds": DUE_SECONDS}
        self._run(BULK_DAG, conf, doing="a Spark job schedules each row of a Parquet file as a message")
        done = json.loads((self.folder / "report.json").read_text())
        [rejects] = [Path(file).name for file in done["rejects"]]
        scheduled = sum(done["outcomes"].values())
        self.report.step(
            f"{done['rows']} rows: {scheduled} messages scheduled, {done['rejected']} row rejected,"
            f" {done['seconds']:.0f} s after Spark has started; the rejected row and the reason are in {rejects}"
        )
        return scheduled

    def _see_messages_dispatched(self, scheduled: int) -> None:
        def all_dispatched() -> bool:
            with self.broker.ledger.read() as connection:
                return listing.count_by_state(connection, channel=CHANNEL)[State.DISPATCHED] == scheduled

        what = f"all {scheduled} messages of channel {CHANNEL} are dispatched"
        self.airflow.wait_for(all_dispatched, what=what, seconds=STEP_SECONDS)
        self.report.step(what)

    def _report_lateness(self) -> None:
        output = self.folder / "lateness"
        self._run(LATENESS_DAG, {"output": str(output)}, doing="a Spark job reads the journal of all messages so far")
        self.report.step("how late the messages of this demo were:")
        lines = (output / "report.md").read_text().splitlines()
        tables = [line.replace("\\_", "_") for line in lines if line.startswith("|") and not line.startswith("| :--")]
        self.report.show("\n".join(f"          {line}" for line in tables))
        self.report.step(f"the report with plots: {output / 'report.html'}")

    def _run(self, dag_id: str, conf: dict[str, object], *, doing: str) -> None:
        self.api.wait_for_dag(dag_id)
        run_id = self.api.trigger(dag_id, conf)
        self.report.step(f"started DAG {dag_id}: {doing}")
        state = self.api.wait_for_run(dag_id, run_id, seconds=STEP_SECONDS)
        if state != "success":
            raise RuntimeError(f"run {run_id} of {dag_id} ended as {state}")
