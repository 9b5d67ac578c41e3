"""The first part of the demo: follow one DAG run and its messages until they are received."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.records import MessageRecord
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import Delivery
from demo.pipeline_tour import PipelineTour
from demo.report import Report
from demo.spark_tour import SparkTour
from tools.servers.airflow import Airflow

DEMO_DAG = "example_reminder"
CHANNEL = "reminders"
MESSAGES = 4
#: Time limit of each step, for a busy machine; the delay of the messages is added to it.
STEP_SECONDS = 180
#: Delay of the first message. With SQLite, Airflow needs a few seconds to defer and resume a task.
DELAY_SECONDS = 12


class Tour:
    """Follows one run of the demo DAG, and one with Spark if Java is available."""

    def __init__(self, airflow: Airflow, report: Report, *, with_spark: bool) -> None:
        self.airflow = airflow
        self.report = report
        self.api = airflow.api()
        self.broker = EmbeddedBroker(Ledger(airflow.ledger_url))
        self.received: dict[str, datetime] = {}
        self.spark = SparkTour(airflow, self.api, self.broker, report) if with_spark else None
        self.pipeline = PipelineTour(airflow, self.api, self.broker, report) if with_spark else None

    def run(self) -> None:
        """Raise if a step does not happen in time."""
        with self.api, self.broker:
            run_id = self._start_run()
            waiting = self._see_messages_scheduled()
            self._see_task_deferred(run_id)
            if self.spark is not None:
                self.spark.begin()
            self._receive(waiting)
            self._see_task_resumed(run_id)
            self.report.show(self._summary(self._records()))
            if self.spark is not None:
                self.spark.follow()
            if self.pipeline is not None:
                self.pipeline.follow()
        self.report.step("run ./dev up to keep this Airflow running and look at it in the browser")

    def _start_run(self) -> str:
        self.api.wait_for_dag(DEMO_DAG)
        run_id = self.api.trigger(DEMO_DAG, {"seconds": DELAY_SECONDS})
        self.report.step(f"started DAG {DEMO_DAG}: run {run_id}")
        return run_id

    def _see_messages_scheduled(self) -> Sequence[MessageRecord]:
        def all_scheduled() -> Sequence[MessageRecord] | None:
            records = self._records()
            return records if len(records) == MESSAGES else None

        what = f"the tasks have scheduled {MESSAGES} messages"
        records: Sequence[MessageRecord] = self.airflow.wait_for(all_scheduled, what=what, seconds=STEP_SECONDS)
        for record in records:
            wait = (record.message.deliver_at - record.scheduled_at).total_seconds()
            task_id = record.message.origin.task_id if record.message.origin else "?"
            due = _clock(record.message.deliver_at)
            self.report.step(f"task {task_id} scheduled message {record.message.id}, due {due} (in {wait:.1f} s)")
        return records

    def _see_task_deferred(self, run_id: str) -> None:
        self.api.wait_for_task(DEMO_DAG, run_id, "remind_and_wait", frozenset({"deferred"}), seconds=STEP_SECONDS)

        def no_worker_busy() -> dict[str, Any] | None:
            pool = self.api.pool()
            return pool if pool["deferred_slots"] == 1 and pool["occupied_slots"] == 0 else None

        what = "one task is deferred and no worker slot is taken"
        pool = self.airflow.wait_for(no_worker_busy, what=what, seconds=STEP_SECONDS)
        self.report.step(
            f"task remind_and_wait is deferred; worker slots taken: {pool['occupied_slots']} of {pool['slots']}"
        )

    def _receive(self, waiting: Sequence[MessageRecord]) -> None:
        last_due = max(record.message.deliver_at for record in waiting)
        seconds = STEP_SECONDS + (last_due - datetime.now(UTC)).total_seconds()

        def all_received() -> bool:
            for delivery in self.broker.receive(CHANNEL, limit=MESSAGES):
                self._check_and_ack(delivery)
            return len(self.received) == len(waiting)

        what = f"{MESSAGES} messages are received from channel {CHANNEL}"
        self.airflow.wait_for(all_received, what=what, seconds=seconds, interval=0.05)

    def _check_and_ack(self, delivery: Delivery) -> None:
        now, message = datetime.now(UTC), delivery.message
        self.broker.ack([delivery])
        record = self._record(message.id)
        if record.lateness is None or record.lateness < timedelta(0) or message.id in self.received:
            raise RuntimeError(f"message {message.id} came early or twice: {record}")
        self.received[message.id] = now
        self.report.step(
            f"message {message.id} was dispatched {_ms(record.lateness)} late and received: {message.payload.decode()}"
        )

    def _see_task_resumed(self, run_id: str) -> None:
        task = self.api.wait_for_task(
            DEMO_DAG, run_id, "remind_and_wait", frozenset({"success", "failed"}), seconds=STEP_SECONDS
        )
        self.report.step(f"task remind_and_wait was resumed by the dispatch: {task['state']}")
        state = self.api.wait_for_run(DEMO_DAG, run_id, seconds=STEP_SECONDS)
        if state != "success":
            raise RuntimeError(f"run {run_id} of {DEMO_DAG} ended as {state}")
        self.report.step(f"the DAG run ended: {state}")

    def _summary(self, records: Sequence[MessageRecord]) -> Table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("message id", "scheduled at", "due", "dispatched at", "lateness", "received"):
            table.add_column(name, no_wrap=True)
        for record in records:
            if record.state is not State.DISPATCHED or record.dispatched_at is None or record.lateness is None:
                raise RuntimeError(f"message {record.message.id} is {record.state.name}")
            table.add_row(
                record.message.id,
                _clock(record.scheduled_at),
                _clock(record.message.deliver_at),
                _clock(record.dispatched_at),
                _ms(record.lateness),
                _clock(self.received[record.message.id]),
            )
        return table

    def _records(self) -> Sequence[MessageRecord]:
        with self.broker.ledger.read() as connection:
            return listing.page(connection, channel=CHANNEL).records

    def _record(self, message_id: str) -> MessageRecord:
        with self.broker.ledger.read() as connection:
            return listing.get(connection, message_id)


def _clock(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%H:%M:%S}.{moment.microsecond // 1000:03d}"


def _ms(duration: timedelta) -> str:
    return f"{duration / timedelta(milliseconds=1):.0f} ms"
