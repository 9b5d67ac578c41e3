"""The first schema: messages, embedded channels, journal, counts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "delay_channel_message",
        sa.Column(
            "message_seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False
        ),
        sa.Column("channel", sa.String(length=255), nullable=False),
        sa.Column("deliver_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("visible_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("handle", sa.String(length=36), nullable=True),
        sa.Column("received_count", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("message_seq", name=op.f("pk_delay_channel_message")),
    )
    op.create_index(
        "ix_delay_channel_message_order",
        "delay_channel_message",
        ["channel", "deliver_at_ms", "message_seq"],
        unique=False,
    )
    op.create_table(
        "delay_event",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("xid", sa.BigInteger(), nullable=False),
        sa.Column("message_seq", sa.BigInteger(), nullable=False),
        sa.Column("message_id", sa.String(length=255), nullable=False),
        sa.Column("channel", sa.String(length=255), nullable=False),
        sa.Column("change", sa.String(length=16), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("deliver_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_delay_event")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_delay_event_commit_order", "delay_event", ["xid", "seq"], unique=False)
    op.create_index(op.f("ix_delay_event_message_seq"), "delay_event", ["message_seq"], unique=False)
    op.create_table(
        "delay_message_count",
        sa.Column("destination", sa.String(length=255), nullable=False),
        sa.Column("channel", sa.String(length=255), nullable=False),
        sa.Column("state", sa.SmallInteger(), nullable=False),
        sa.Column("n", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("destination", "channel", "state", name=op.f("pk_delay_message_count")),
    )
    op.create_table(
        "delay_scheduled_message",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("channel", sa.String(length=255), nullable=False),
        sa.Column("state", sa.SmallInteger(), nullable=False),
        sa.Column("deliver_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("scheduled_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("dispatched_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("content_type", sa.String(length=255), nullable=False),
        sa.Column("key", sa.Text(), nullable=True),
        sa.Column("headers", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("handled_count", sa.Integer(), nullable=False),
        sa.Column("dag_id", sa.String(length=250), nullable=True),
        sa.Column("run_id", sa.String(length=250), nullable=True),
        sa.Column("task_id", sa.String(length=250), nullable=True),
        sa.Column("map_index", sa.Integer(), nullable=True),
        sa.Column("destination", sa.String(length=255), nullable=True),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("claimed_by", sa.String(length=255), nullable=True),
        sa.Column("claimed_until_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_delay_scheduled_message")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_delay_scheduled_message_channel",
        "delay_scheduled_message",
        ["channel", "state", "deliver_at_ms", "seq"],
        unique=False,
    )
    op.create_index(
        "ix_delay_scheduled_message_claimed",
        "delay_scheduled_message",
        ["claimed_until_ms"],
        unique=False,
        sqlite_where=sa.text("claimed_until_ms IS NOT NULL"),
        postgresql_where=sa.text("claimed_until_ms IS NOT NULL"),
    )
    op.create_index(
        "ix_delay_scheduled_message_due_for_broker",
        "delay_scheduled_message",
        ["destination", "deliver_at_ms", "seq"],
        unique=False,
        sqlite_where=sa.text("state = 100 AND destination IS NOT NULL AND claimed_until_ms IS NULL"),
        postgresql_where=sa.text("state = 100 AND destination IS NOT NULL AND claimed_until_ms IS NULL"),
    )
    op.create_index(
        "ix_delay_scheduled_message_due_embedded",
        "delay_scheduled_message",
        ["deliver_at_ms", "seq"],
        unique=False,
        sqlite_where=sa.text("state = 100 AND destination IS NULL"),
        postgresql_where=sa.text("state = 100 AND destination IS NULL"),
    )
    op.create_index(
        "ix_delay_scheduled_message_state", "delay_scheduled_message", ["state", "deliver_at_ms", "seq"], unique=False
    )
    op.create_index("uq_delay_scheduled_message_id", "delay_scheduled_message", ["id"], unique=True)


def downgrade() -> None:
    """Drop the tables with all messages."""
    op.drop_table("delay_channel_message")
    op.drop_table("delay_scheduled_message")
    op.drop_table("delay_message_count")
    op.drop_table("delay_event")
