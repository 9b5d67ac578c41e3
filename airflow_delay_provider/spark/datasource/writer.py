"""The writer behind ``df.write.format("delay")``: one part for the driver, one for each task."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from airflow_delay_provider.brokers.port import HasTopology, Outcome
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.exceptions import ConfigurationError, DelayError
from airflow_delay_provider.spark.connection import JobConnection, find_job_connection
from airflow_delay_provider.spark.datasource.batches import BatchScheduler, slices
from airflow_delay_provider.spark.datasource.columns import MessageColumns
from airflow_delay_provider.spark.datasource.locations import Location
from airflow_delay_provider.spark.datasource.options import OnRejects, WriteOptions
from airflow_delay_provider.spark.datasource.rejects import Reject, RejectsFolder

if TYPE_CHECKING:
    from pyarrow import RecordBatch

#: Rejects whose reasons a failed write and its report show.
EXAMPLES = 5


@dataclass(kw_only=True)
class WriteCounts(WriterCommitMessage):
    """What became of the rows of a task, or of all tasks."""

    rows: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    #: By the column that is wrong.
    rejects: Counter[str] = field(default_factory=Counter)
    #: The first of them, each only once.
    reasons: list[str] = field(default_factory=list)
    #: Files with rejects.
    parts: list[str] = field(default_factory=list)

    def add(self, other: WriteCounts) -> None:
        """Add the counts of a task."""
        self.rows += other.rows
        self.outcomes += other.outcomes
        self.rejects += other.rejects
        self._add_reasons(other.reasons)
        self.parts += other.parts

    def add_batch(self, rows: int, outcomes: Counter[str], rejects: Sequence[Reject]) -> None:
        """Add the counts of a batch."""
        self.rows += rows
        self.outcomes += outcomes
        self.rejects.update(reject.field for reject in rejects)
        self._add_reasons(reject.reason for reject in rejects)

    def _add_reasons(self, reasons: Iterable[str]) -> None:
        for reason in reasons:
            if len(self.reasons) < EXAMPLES and reason not in self.reasons:
                self.reasons.append(reason)

    def describe(self) -> str:
        """Return one line for people."""
        parts = [f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items())]
        if rejected := self.rejects.total():
            parts.append(f"{rejected} rejected")
        return f"{self.rows} rows: {', '.join(parts) or 'nothing to do'}"


class RejectedRowsError(DelayError):
    """Some rows were rejected; all others are scheduled."""


@dataclass(frozen=True, kw_only=True)
class DelayWriter(DataSourceArrowWriter):
    """Schedules the rows of a DataFrame; Spark sends it to each task, and shows it nowhere.

    At least once, with the same ids: a task that fails after the broker has confirmed is run again by Spark. The ledger
    knows ids and keeps what is there; Kafka and RabbitMQ deliver such a message again, with the same id.
    """

    options: WriteOptions
    connection: JobConnection = field(repr=False)
    rejects: RejectsFolder | None
    report: Location | None

    @classmethod
    def prepare(cls, options: WriteOptions) -> DelayWriter:
        """Return a writer whose broker answers: what is wrong for all rows is one error, before any is written."""
        folder, report = None, None
        if options.rejects is not None:
            folder = RejectsFolder.prepare(options.rejects)
        if options.report is not None:
            report = Location.parse("report", options.report)
            report.prepare_file()
        connection = find_job_connection(options.connection, hold=options.hold, connection_file=options.connection_file)
        _prepare_broker(connection, options)
        return cls(options=options, connection=connection, rejects=folder, report=report)

    # -- in tasks --------------------------------------------------------------------------------------------------

    def write(self, iterator: Iterator[RecordBatch]) -> WriteCounts:
        """Schedule the rows of one task and return its counts."""
        counts, columns = WriteCounts(), MessageColumns(self.options)
        with ExitStack() as stack:
            broker = stack.enter_context(self.connection.open())
            part = None if self.rejects is None else stack.enter_context(self.rejects.open_part(_name_of_task()))
            scheduler = BatchScheduler(broker, self.options.on_conflict)
            for batch in iterator:
                for rows in slices(batch, most_rows=self.options.batch_size):
                    scheduled = scheduler.schedule(columns.read(rows, now=broker.clock.now()))
                    rejects = [Reject.of(rows, number, error) for number, error in sorted(scheduled.errors.items())]
                    counts.add_batch(rows.num_rows, scheduled.outcomes, rejects)
                    if part is not None:
                        part.write(rejects)
        if part is not None and part.name is not None:
            counts.parts = [part.name]
        return counts

    # -- on the driver ---------------------------------------------------------------------------------------------

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish the rejects and the report of a write whose tasks have all succeeded."""
        total = _sum(messages)
        # The log of the process that commits: PySpark configures no logging in it.
        sys.stderr.write(f"{self._describe(total)}\n")
        try:
            if self.rejects is not None:
                self.rejects.publish(total.parts)
            if self.report is not None:
                self.report.write(json.dumps(self._as_report(total), indent=2).encode() + b"\n")
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}; all good rows are scheduled, so do not write them again") from None
        if total.rejects and self.options.on_rejects is OnRejects.FAIL:
            raise RejectedRowsError(self._describe_rejects(total))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Delete the rejects of a write that failed; messages that are scheduled stay so.

        Spark also aborts a write whose commit has failed: then all tasks have a message, and their rejects are needed.
        """
        if self.rejects is not None and None in messages:
            self.rejects.discard()

    def _describe(self, total: WriteCounts) -> str:
        return f"delay: {total.describe()} (connection {self.connection.conn_id})"

    def _describe_rejects(self, total: WriteCounts) -> str:
        columns = ", ".join(f"{name} {count}" for name, count in total.rejects.most_common())
        if self.rejects is not None:
            place = f"they are in {self.rejects.file_of('*.jsonl').text}"
        else:
            place = "name a folder with the option rejects to get all of them"
            if not self.connection.holds_in_ledger:
                place += " (a repeated write sends all other rows again, with their ids)"
        reasons = "; ".join(total.reasons)
        return (
            f"{total.rejects.total()} of {total.rows} rows were rejected ({columns}) and all others are scheduled;"
            f" {place}; correct these rows and write them again, or use onRejects=keep. The first: {reasons}"
        )

    def _as_report(self, total: WriteCounts) -> Mapping[str, object]:
        return {
            "connection": self.connection.conn_id,
            "rows": total.rows,
            "outcomes": {outcome.value: total.outcomes[outcome.value] for outcome in Outcome},
            "rejected": total.rejects.total(),
            "rejected_by_column": dict(total.rejects),
            "knows_ids": self.connection.holds_in_ledger,
            "first_reasons": total.reasons,
            "rejects": None if self.rejects is None else [self.rejects.file_of(part).text for part in total.parts],
        }


def _prepare_broker(connection: JobConnection, options: WriteOptions) -> None:
    with connection.open() as broker:
        if options.on_conflict is not OnConflict.KEEP and not broker.knows_ids:
            raise ConfigurationError(
                f"onConflict: the broker of {connection.conn_id!r} cannot check whether an id is taken, so it does not"
                f" support {options.on_conflict.value!r}; use onConflict=keep, or hold=ledger"
            )
        broker.check()
        if isinstance(broker, HasTopology):
            broker.require_topology()
        if options.channel is not None:
            broker.check_channels([options.channel])


def _name_of_task() -> str:
    """Return a name that no other task or attempt of the write has."""
    context = TaskContext.get()
    return uuid4().hex if context is None else f"{context.partitionId():05d}-{context.taskAttemptId()}"


def _sum(messages: Sequence[WriterCommitMessage | None]) -> WriteCounts:
    total = WriteCounts()
    for message in messages:
        if isinstance(message, WriteCounts):
            total.add(message)
    return total
