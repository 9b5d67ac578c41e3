"""The circuits of Spark clusters."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "delay_cluster_circuit",
        sa.Column("cluster", sa.String(length=255), nullable=False),
        sa.Column("down_since_ms", sa.BigInteger(), nullable=True),
        sa.Column("failed_checks", sa.Integer(), nullable=False),
        sa.Column("next_check_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("bucket_full_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", name=op.f("pk_delay_cluster_circuit")),
    )


def downgrade() -> None:
    """Forget outages and tokens; the next check finds out."""
    op.drop_table("delay_cluster_circuit")
