"""The tables. Times are whole milliseconds since the epoch: exact, index-friendly and the same on every database."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    text,
)

from airflow_delay_provider.domain.lifecycle import State

#: SQLite numbers rows by itself only for INTEGER keys.
Sequence = BigInteger().with_variant(Integer(), "sqlite")

#: Names embedded messages where a connection names others: in counts, figures, positions and filters.
EMBEDDED = ""

metadata = MetaData(naming_convention={"ix": "ix_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s"})

scheduled_message = Table(
    "delay_scheduled_message",
    metadata,
    Column("seq", Sequence, primary_key=True, autoincrement=True),
    Column("id", String(255), nullable=False),
    Column("channel", String(255), nullable=False),
    Column("state", SmallInteger, nullable=False),
    Column("deliver_at_ms", BigInteger, nullable=False),
    Column("scheduled_at_ms", BigInteger, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
    Column("dispatched_at_ms", BigInteger),
    Column("payload", LargeBinary, nullable=False),
    Column("content_type", String(255), nullable=False),
    Column("key", Text),
    Column("headers", JSON(none_as_null=True)),
    Column("priority", Integer, nullable=False),
    Column("handled_count", Integer, nullable=False),
    Column("dag_id", String(250)),
    Column("run_id", String(250)),
    Column("task_id", String(250)),
    Column("map_index", Integer),
    # The connection of the broker it goes to; NULL is a channel in this database.
    Column("destination", String(255)),
    # Raised by every replace, reschedule, expedite and requeue.
    Column("generation", Integer, nullable=False),
    # The dispatcher that is sending it to another broker right now.
    Column("claimed_by", String(255)),
    Column("claimed_until_ms", BigInteger),
    # 1: the broker of ``destination`` holds it, and this row is projected from its journal; it is not sent from here.
    Column("held_by_broker", SmallInteger, nullable=False, server_default=text("0")),
    sqlite_autoincrement=True,
)

_WAITING = f"state = {State.SCHEDULED.value}"
_DUE_EMBEDDED = text(f"{_WAITING} AND destination IS NULL")
_DUE_FOR_BROKER = text(f"{_WAITING} AND destination IS NOT NULL AND claimed_until_ms IS NULL AND held_by_broker = 0")
_FOR_BROKER = text("destination IS NOT NULL")
_CLAIMED = text("claimed_until_ms IS NOT NULL")
_OF_TASK = text("dag_id IS NOT NULL")

Index("uq_delay_scheduled_message_id", scheduled_message.c.id, unique=True)
Index(
    "ix_delay_scheduled_message_state",
    scheduled_message.c.state,
    scheduled_message.c.deliver_at_ms,
    scheduled_message.c.seq,
)
Index(
    "ix_delay_scheduled_message_channel",
    scheduled_message.c.channel,
    scheduled_message.c.state,
    scheduled_message.c.deliver_at_ms,
    scheduled_message.c.seq,
)
Index(
    "ix_delay_scheduled_message_due_embedded",
    scheduled_message.c.deliver_at_ms,
    scheduled_message.c.seq,
    sqlite_where=_DUE_EMBEDDED,
    postgresql_where=_DUE_EMBEDDED,
)
Index(
    "ix_delay_scheduled_message_due_for_broker",
    scheduled_message.c.destination,
    scheduled_message.c.deliver_at_ms,
    scheduled_message.c.seq,
    sqlite_where=_DUE_FOR_BROKER,
    postgresql_where=_DUE_FOR_BROKER,
)
# For listing the messages of one connection; embedded messages are not in it.
Index(
    "ix_delay_scheduled_message_destination",
    scheduled_message.c.destination,
    scheduled_message.c.held_by_broker,
    scheduled_message.c.state,
    scheduled_message.c.deliver_at_ms,
    scheduled_message.c.seq,
    sqlite_where=_FOR_BROKER,
    postgresql_where=_FOR_BROKER,
)
Index(
    "ix_delay_scheduled_message_claimed",
    scheduled_message.c.claimed_until_ms,
    sqlite_where=_CLAIMED,
    postgresql_where=_CLAIMED,
)

# For listing the messages of one DAG, and of one run or task; messages from outside of Airflow are not in them.
Index(
    "ix_delay_scheduled_message_dag",
    scheduled_message.c.dag_id,
    scheduled_message.c.state,
    scheduled_message.c.deliver_at_ms,
    scheduled_message.c.seq,
    sqlite_where=_OF_TASK,
    postgresql_where=_OF_TASK,
)
Index(
    "ix_delay_scheduled_message_run",
    scheduled_message.c.dag_id,
    scheduled_message.c.run_id,
    scheduled_message.c.task_id,
    scheduled_message.c.deliver_at_ms,
    scheduled_message.c.seq,
    sqlite_where=_OF_TASK,
    postgresql_where=_OF_TASK,
)

#: The embedded channels: messages that were dispatched and are not acknowledged yet, in due order.
channel_message = Table(
    "delay_channel_message",
    metadata,
    # No foreign key, which would look up every message again; pruning keeps messages that are in channels.
    Column("message_seq", Sequence, primary_key=True, autoincrement=False),
    Column("channel", String(255), nullable=False),
    Column("deliver_at_ms", BigInteger, nullable=False),
    Column("visible_at_ms", BigInteger, nullable=False),
    Column("handle", String(36)),
    Column("received_count", Integer, nullable=False),
    Index("ix_delay_channel_message_order", "channel", "deliver_at_ms", "message_seq"),
)

#: The embedded journal. ``xid`` is the writing transaction: rows become readable in (xid, seq) order, so a reader that
#: stays below the oldest transaction still running never passes by a row that is committed later.
event = Table(
    "delay_event",
    metadata,
    Column("seq", Sequence, primary_key=True, autoincrement=True),
    Column("xid", BigInteger, nullable=False),
    Column("message_seq", BigInteger, nullable=False, index=True),
    Column("message_id", String(255), nullable=False),
    Column("channel", String(255), nullable=False),
    Column("change", String(16), nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("deliver_at_ms", BigInteger, nullable=False),
    Column("reason", Text),
    Index("ix_delay_event_commit_order", "xid", "seq"),
    sqlite_autoincrement=True,
)

#: How many messages are in each state, changed in the transaction that changes the state.
message_count = Table(
    "delay_message_count",
    metadata,
    # "" is this database.
    Column("destination", String(255), primary_key=True),
    Column("channel", String(255), primary_key=True),
    Column("state", SmallInteger, primary_key=True),
    Column("n", BigInteger, nullable=False),
)

#: How often each change happened, by minute, hour and day; folded from the journal.
statistic = Table(
    "delay_statistic",
    metadata,
    # 60, 3600 or 86400.
    Column("step_seconds", Integer, primary_key=True, autoincrement=False),
    Column("start_ms", BigInteger, primary_key=True, autoincrement=False),
    # "" is this database.
    Column("destination", String(255), primary_key=True),
    # A change of the journal, or "depth": how many messages were scheduled when the interval was last sampled.
    Column("kind", String(16), primary_key=True),
    # Of "dispatched": the bucket of the lateness histogram, by its upper bound in milliseconds. Negative:
    # early, or of unknown lateness. Otherwise 0.
    Column("bucket", BigInteger, primary_key=True, autoincrement=False),
    Column("n", BigInteger, nullable=False),
    # Of "dispatched": the longest lateness in the bucket. Otherwise 0.
    Column("max_ms", BigInteger, nullable=False),
)

#: How many scheduled messages are due in each minute, hour and day; folded from the journal.
due_count = Table(
    "delay_due_count",
    metadata,
    # 60, 3600 or 86400.
    Column("step_seconds", Integer, primary_key=True, autoincrement=False),
    Column("start_ms", BigInteger, primary_key=True, autoincrement=False),
    # "" is this database.
    Column("destination", String(255), primary_key=True),
    Column("n", BigInteger, nullable=False),
)

#: The position up to which the journal of another broker has been projected; that of "" is the position up to which
#: the embedded journal has been folded into statistics.
journal_position = Table(
    "delay_journal_position",
    metadata,
    Column("destination", String(255), primary_key=True),
    Column("position", Text, nullable=False),
)

#: One row for each Spark cluster to which failed jobs are submitted again.
cluster_circuit = Table(
    "delay_cluster_circuit",
    metadata,
    Column("cluster", String(255), primary_key=True),
    # NULL: the cluster is not known to be down.
    Column("down_since_ms", BigInteger),
    Column("failed_checks", Integer, nullable=False),
    Column("next_check_at_ms", BigInteger),
    # When the token bucket of submissions is full again.
    Column("bucket_full_at_ms", BigInteger, nullable=False),
)

#: Which ledger this is: one row, written with the first tables.
ledger_identity = Table(
    "delay_ledger",
    metadata,
    Column("id", String(36), primary_key=True),
    # The host that created the tables.
    Column("host", String(255), nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
)

#: One row a dispatcher, renewed every few seconds; its times are of the database's clock.
dispatcher = Table(
    "delay_dispatcher",
    metadata,
    Column("owner", String(255), primary_key=True),
    Column("host", String(255), nullable=False),
    Column("boot_id", String(64)),
    Column("pid", Integer, nullable=False),
    Column("version", String(64), nullable=False),
    Column("started_at_ms", BigInteger, nullable=False),
    Column("seen_at_ms", BigInteger, nullable=False),
    # When it stopped cleanly; NULL if it runs or was killed.
    Column("stopped_at_ms", BigInteger),
    # Connections of its options --index and --kafka.
    Column("index_connections", JSON, nullable=False),
    Column("kafka_connections", JSON, nullable=False),
    # The health of each loop, by name.
    Column("loops", JSON, nullable=False),
    # Its clock minus the database's clock; NULL if it was not measured.
    Column("clock_skew_ms", BigInteger),
)

#: One row for each connection of a broker, as a dispatcher last found it; its times are of the database's clock.
broker = Table(
    "delay_broker",
    metadata,
    Column("conn_id", String(255), primary_key=True),
    Column("checked_at_ms", BigInteger, nullable=False),
    Column("reachable", Boolean, nullable=False),
    # One line about the broker, from the last check that succeeded.
    Column("description", Text),
    # Why the last check failed; NULL if it did not.
    Column("error", Text),
    # NULL: the topology was never verified, or the broker has none.
    Column("topology_verified_at_ms", BigInteger),
    # A list of {"text", "is_problem"}.
    Column("topology_issues", JSON, nullable=False),
    # The broker's clock minus the dispatcher's clock; NULL if it is unknown.
    Column("clock_skew_ms", BigInteger),
    Column("skew_measured_at_ms", BigInteger),
)
