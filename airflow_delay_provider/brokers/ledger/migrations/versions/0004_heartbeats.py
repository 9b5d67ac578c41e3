"""Which ledger this is, and which dispatchers serve it."""

from __future__ import annotations

import socket
import time
from uuid import uuid4

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the tables, and the identity of this ledger."""
    identity = op.create_table(
        "delay_ledger",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_delay_ledger")),
    )
    row = {"id": str(uuid4()), "host": socket.gethostname(), "created_at_ms": int(time.time() * 1000)}
    op.bulk_insert(identity, [row])
    op.create_table(
        "delay_dispatcher",
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("boot_id", sa.String(length=64), nullable=True),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("seen_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("stopped_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("index_connections", sa.JSON(), nullable=False),
        sa.Column("kafka_connections", sa.JSON(), nullable=False),
        sa.Column("loops", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("owner", name=op.f("pk_delay_dispatcher")),
    )


def downgrade() -> None:
    """Forget both; dispatchers of the version before write no heartbeats."""
    op.drop_table("delay_dispatcher")
    op.drop_table("delay_ledger")
