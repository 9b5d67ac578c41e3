"""Databases that tests use one after the other."""

from __future__ import annotations

from sqlalchemy.engine import make_url

from airflow_delay_provider.brokers.ledger.database import Ledger
from tests.databases import EmptiedDatabases, execute
from tests.unit.brokers.ledger import rows
from tests.unit.brokers.ledger.rows import messages


def test_a_database_is_lent_again_empty_and_counts_from_the_start(emptied_databases: EmptiedDatabases) -> None:
    first_rows = []
    for _ in range(2):
        with emptied_databases.lend() as url:
            ledger = Ledger(url)
            assert rows.count(ledger) == {}
            rows.insert(ledger, messages(1))
            with ledger.read() as connection:
                first_rows.append(connection.exec_driver_sql("SELECT seq FROM delay_scheduled_message").scalar())
            ledger.close()
    assert first_rows[0] == first_rows[1]
    with emptied_databases.lend() as again:
        assert make_url(again) == make_url(url)


def test_a_database_that_was_changed_or_is_in_use_is_not_lent_again(emptied_databases: EmptiedDatabases) -> None:
    with emptied_databases.lend() as changed:
        execute(changed, "CREATE TABLE mine (id int)")
    with emptied_databases.lend() as used:
        assert used != changed
        ledger = Ledger(used)
        assert rows.count(ledger) == {}  # and stays connected
    with emptied_databases.lend() as fresh:
        assert fresh not in (changed, used)
    ledger.close()
