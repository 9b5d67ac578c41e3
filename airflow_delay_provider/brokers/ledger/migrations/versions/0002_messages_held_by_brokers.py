"""Messages that other brokers hold: rows projected from the journal of the broker, and the position reached."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_DUE_AWAY = "state = 100 AND destination IS NOT NULL AND claimed_until_ms IS NULL"


def upgrade() -> None:
    """Add the column, which changes no row, and the position."""
    op.add_column(
        "delay_scheduled_message",
        sa.Column("held_by_broker", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
    )
    _replace_due_for_broker(f"{_DUE_AWAY} AND held_by_broker = 0")
    op.create_index(
        "ix_delay_scheduled_message_destination",
        "delay_scheduled_message",
        ["destination", "held_by_broker", "state", "deliver_at_ms", "seq"],
        unique=False,
        sqlite_where=sa.text("destination IS NOT NULL"),
        postgresql_where=sa.text("destination IS NOT NULL"),
    )
    op.create_table(
        "delay_journal_position",
        sa.Column("destination", sa.String(length=255), nullable=False),
        sa.Column("position", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("destination", name=op.f("pk_delay_journal_position")),
    )


def downgrade() -> None:
    """Forget what brokers hold: the version before would send those messages once more."""
    held = "SELECT seq FROM delay_scheduled_message WHERE held_by_broker = 1"
    op.execute(f"DELETE FROM delay_event WHERE message_seq IN ({held})")  # noqa: S608
    op.execute(
        "UPDATE delay_message_count SET n = n - (SELECT COUNT(*) FROM delay_scheduled_message AS message"
        " WHERE message.held_by_broker = 1 AND message.destination = delay_message_count.destination"
        " AND message.channel = delay_message_count.channel AND message.state = delay_message_count.state)"
    )
    op.execute("DELETE FROM delay_scheduled_message WHERE held_by_broker = 1")
    op.drop_table("delay_journal_position")
    op.drop_index("ix_delay_scheduled_message_destination", "delay_scheduled_message")
    # SQLite drops no column that an index mentions.
    _replace_due_for_broker(_DUE_AWAY)
    op.drop_column("delay_scheduled_message", "held_by_broker")


def _replace_due_for_broker(condition: str) -> None:
    op.drop_index("ix_delay_scheduled_message_due_for_broker", "delay_scheduled_message")
    op.create_index(
        "ix_delay_scheduled_message_due_for_broker",
        "delay_scheduled_message",
        ["destination", "deliver_at_ms", "seq"],
        unique=False,
        sqlite_where=sa.text(condition),
        postgresql_where=sa.text(condition),
    )
