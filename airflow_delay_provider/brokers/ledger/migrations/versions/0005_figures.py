"""Figures that are read at a fixed cost: statistics, due counts, the status of brokers, and indexes by origin."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_ORIGIN_INDEXES = {
    "ix_delay_scheduled_message_dag": ["dag_id", "state", "deliver_at_ms", "seq"],
    "ix_delay_scheduled_message_run": ["dag_id", "run_id", "task_id", "deliver_at_ms", "seq"],
}


def upgrade() -> None:
    """Add the tables, which a dispatcher fills from the whole journal, and the indexes."""
    op.create_table(
        "delay_statistic",
        sa.Column("step_seconds", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("start_ms", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("destination", sa.String(length=255), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("bucket", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("n", sa.BigInteger(), nullable=False),
        sa.Column("max_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "step_seconds", "start_ms", "destination", "kind", "bucket", name=op.f("pk_delay_statistic")
        ),
    )
    op.create_table(
        "delay_due_count",
        sa.Column("step_seconds", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("start_ms", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("destination", sa.String(length=255), nullable=False),
        sa.Column("n", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("step_seconds", "start_ms", "destination", name=op.f("pk_delay_due_count")),
    )
    op.create_table(
        "delay_broker",
        sa.Column("conn_id", sa.String(length=255), nullable=False),
        sa.Column("checked_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("reachable", sa.Boolean(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("topology_verified_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("topology_issues", sa.JSON(), nullable=False),
        sa.Column("clock_skew_ms", sa.BigInteger(), nullable=True),
        sa.Column("skew_measured_at_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("conn_id", name=op.f("pk_delay_broker")),
    )
    op.add_column("delay_dispatcher", sa.Column("clock_skew_ms", sa.BigInteger(), nullable=True))
    for name, columns in _ORIGIN_INDEXES.items():
        op.create_index(
            name,
            "delay_scheduled_message",
            columns,
            unique=False,
            sqlite_where=sa.text("dag_id IS NOT NULL"),
            postgresql_where=sa.text("dag_id IS NOT NULL"),
        )


def downgrade() -> None:
    """Forget the figures, and how far the journal was folded; the messages stay."""
    for name in _ORIGIN_INDEXES:
        op.drop_index(name, "delay_scheduled_message")
    op.drop_column("delay_dispatcher", "clock_skew_ms")
    op.execute("DELETE FROM delay_journal_position WHERE destination = ''")
    op.drop_table("delay_broker")
    op.drop_table("delay_due_count")
    op.drop_table("delay_statistic")
