"""Alembic's entry: runs on the connection that ``migrations`` hands over."""

from __future__ import annotations

from alembic import context

from airflow_delay_provider.brokers.ledger.migrations import VERSION_TABLE
from airflow_delay_provider.brokers.ledger.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
)
context.run_migrations()
