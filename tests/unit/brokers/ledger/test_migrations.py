from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, select, text

from airflow_delay_provider.brokers.ledger import migrations, projection
from airflow_delay_provider.brokers.ledger.database import Ledger, read_identity
from airflow_delay_provider.brokers.ledger.migrations import HEAD, VERSION_TABLE
from airflow_delay_provider.brokers.ledger.tables import due_count, metadata
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change, JournalEntry, State
from tests.heartbeats import dispatchers_of, write_heartbeat
from tests.unit.brokers.ledger import rows
from tests.unit.brokers.ledger.rows import messages

pytestmark = pytest.mark.usefixtures("real_migrations")

FIGURES = {"delay_statistic", "delay_due_count", "delay_broker"}


@pytest.fixture(params=["sqlite_url", "empty_postgres_url"])
def empty_ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    ledger = Ledger(request.getfixturevalue(request.param))
    yield ledger
    ledger.close()


def our_tables(ledger: Ledger) -> set[str]:
    return {name for name in inspect(ledger.engine).get_table_names() if name.startswith("delay_")} - {VERSION_TABLE}


def index_definitions(connection: Connection) -> set[str]:
    """With their conditions, which Alembic does not compare."""
    if connection.dialect.name == "sqlite":
        query = "SELECT sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
    else:
        query = "SELECT indexdef FROM pg_indexes WHERE tablename LIKE 'delay_%'"
    found = connection.execute(text(query)).scalars()
    return {" ".join(sql.replace('"', "").split()) for sql in found if VERSION_TABLE not in sql}


def test_the_migrations_make_exactly_the_tables_that_the_code_uses(empty_ledger: Ledger):
    """B16, B18, B42"""
    assert empty_ledger.migrate() == migrations.HEAD
    with empty_ledger.engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, metadata) == []
        migrated = index_definitions(connection)
    migrations.downgrade(empty_ledger.engine)
    metadata.create_all(empty_ledger.engine)
    with empty_ledger.engine.connect() as connection:
        assert migrated == index_definitions(connection)


def test_the_tables_can_be_removed_and_made_again(empty_ledger: Ledger):
    """B42, B44"""
    empty_ledger.migrate()
    made = our_tables(empty_ledger)
    assert made == set(metadata.tables)
    rows.insert(empty_ledger, messages(1))
    migrations.downgrade(empty_ledger.engine)
    assert our_tables(empty_ledger) == set()
    assert empty_ledger.revision() is None
    assert empty_ledger.migrate() == migrations.HEAD
    assert our_tables(empty_ledger) == made
    assert rows.count(empty_ledger) == {}


def test_downgrading_to_a_version_that_would_send_them_again_deletes_broker_held_messages(empty_ledger: Ledger):
    """B33, B42, B44"""
    empty_ledger.migrate()
    ours, theirs, ended = messages(1, 2, 3)
    rows.insert(empty_ledger, [ours], destination="rabbit")
    entries = [
        JournalEntry(
            message_id=item.id,
            change=change,
            at=item.deliver_at,
            channel="orders",
            deliver_at=item.deliver_at,
            position="2",
        )
        for item, change in ((theirs, Change.SCHEDULED), (ended, Change.DISPATCHED))
    ]
    empty_ledger.transact(lambda c: projection.project(c, "rabbit", entries, after=FROM_THE_START, position="2"))
    assert rows.count(empty_ledger) == {State.SCHEDULED: 2, State.DISPATCHED: 1}
    empty_ledger.downgrade("0001")
    assert empty_ledger.revision() == "0001"
    assert empty_ledger.migrate() == migrations.HEAD
    assert rows.count(empty_ledger) == {State.SCHEDULED: 1}
    assert rows.ids(rows.page(empty_ledger).records) == [ours.id]
    left = rows.read_journal(empty_ledger, 1)
    assert [entry.message_id for entry in left] == [ours.id]
    assert rows.read(empty_ledger, lambda c: projection.position_of(c, "rabbit")) == FROM_THE_START


def test_going_back_to_a_version_without_heartbeats_keeps_the_messages(empty_ledger: Ledger):
    """B42, B44"""
    empty_ledger.migrate()
    rows.insert(empty_ledger, messages(1))
    write_heartbeat(empty_ledger)
    empty_ledger.downgrade("0003")
    assert our_tables(empty_ledger) == set(metadata.tables) - {"delay_dispatcher", "delay_ledger"} - FIGURES
    assert empty_ledger.migrate() == migrations.HEAD
    assert rows.count(empty_ledger) == {State.SCHEDULED: 1}
    assert dispatchers_of(empty_ledger) == []
    assert rows.read(empty_ledger, read_identity).id


def test_going_back_to_a_version_without_figures_folds_the_whole_journal_again_later(empty_ledger: Ledger):
    """B42, B44"""
    empty_ledger.migrate()
    rows.insert(empty_ledger, messages(1, 2))
    write_heartbeat(empty_ledger)
    rows.fold_all(empty_ledger)
    before = rows.read(empty_ledger, lambda c: c.execute(select(due_count)).all())
    assert [row.n for row in before] == [2, 2, 2]
    empty_ledger.downgrade("0004")
    assert our_tables(empty_ledger) == set(metadata.tables) - FIGURES
    assert empty_ledger.migrate() == migrations.HEAD
    rows.fold_all(empty_ledger)
    assert rows.read(empty_ledger, lambda c: c.execute(select(due_count)).all()) == before
    assert [each.clock_skew for each in dispatchers_of(empty_ledger)] == [None]


def test_migrating_again_changes_nothing(ledger: Ledger):
    """B42, B43"""
    rows.insert(ledger, messages(1))
    for _ in range(2):
        assert ledger.migrate() == ledger.revision() == migrations.HEAD
    assert rows.count(ledger) == {State.SCHEDULED: 1}


def test_processes_that_migrate_at_once_wait_for_each_other(empty_ledger: Ledger):
    """B32, B43"""
    ledgers = [Ledger(empty_ledger.url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        revisions = list(pool.map(lambda ledger: ledger.migrate(), ledgers))
    assert revisions == [migrations.HEAD] * 4
    for ledger in ledgers:
        ledger.close()


def test_an_older_version_goes_on_working_with_a_newer_schema(ledger: Ledger):
    """B43: in a rolling deployment the database comes first."""
    rows.insert(ledger, messages(1))
    with ledger.engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    older = Ledger(ledger.url)
    rows.insert(older, messages(1))
    assert older.migrate() == "9999"
    assert rows.count(older) == {State.SCHEDULED: 2}
    older.close()


def test_the_newest_revision_is_the_one_the_code_asks_for():
    """B42"""
    config = Config()
    config.set_main_option("path_separator", "os")
    config.set_main_option("script_location", migrations.__path__[0])
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_heads() == [migrations.HEAD]
    assert [script.revision for script in scripts.walk_revisions()] == sorted(
        (script.revision for script in scripts.walk_revisions()), reverse=True
    ), "revisions are compared as text"


def test_threads_of_one_process_can_open_new_ledgers_at_once(tmp_path: Path):
    """B42"""
    ledgers = [Ledger(f"sqlite:///{tmp_path / name}.db") for name in "abcdefgh"]
    with ThreadPoolExecutor(len(ledgers)) as pool:
        assert set(pool.map(lambda ledger: ledger.migrate(), ledgers)) == {HEAD}
    for ledger in ledgers:
        ledger.close()
