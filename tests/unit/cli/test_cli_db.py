"""`airflow delay db`: the tables of the ledger."""

from __future__ import annotations

import sqlite3

import pytest

from airflow_delay_provider.brokers.ledger.migrations import HEAD, VERSION_TABLE
from tests.unit.cli.commandline import CommandLine

pytestmark = pytest.mark.usefixtures("real_migrations")


def test_the_tables_are_created_checked_and_dropped(delay: CommandLine, sqlite_url: str) -> None:
    """B42: up and down."""
    before = delay("db", "check")
    assert before.code == 3
    assert before.err == (
        f"the ledger at {sqlite_url} has schema revision None, this version needs {HEAD};"
        " run `airflow delay db migrate`\n"
    )
    assert delay.document("db", "migrate") == {"ledger": sqlite_url, "before": None, "revision": HEAD}
    assert delay.document("db", "migrate")["before"] == HEAD
    assert delay.document("db", "check") == {"ledger": sqlite_url, "revision": HEAD}
    down = delay.document("db", "downgrade", "--yes")
    assert (down["before"], down["revision"]) == (HEAD, None)
    assert delay("db", "check").code == 3
    assert delay.document("db", "migrate")["revision"] == HEAD


def test_a_downgrade_must_be_confirmed(delay: CommandLine) -> None:
    """B42: without --yes nothing is lost."""
    delay.document("schedule", "orders", "--payload", "x", "--after", "60")
    result = delay("db", "downgrade")
    assert result.code == 2
    assert result.err == "Going back to revision 'base' drops all tables and messages. Pass --yes to confirm.\n"
    assert delay.counts()["SCHEDULED"] == 1


def test_an_unknown_revision_is_refused(delay: CommandLine) -> None:
    delay.document("schedule", "orders", "--payload", "x", "--after", "60")
    result = delay("db", "downgrade", "--yes", "--revision", "9999")
    assert result.code == 2
    assert result.err.startswith(f"revision: '9999' is not older than {HEAD}; use base")
    assert delay.counts()["SCHEDULED"] == 1


def test_tables_of_a_newer_version_are_left_as_they_are(delay: CommandLine, sqlite_url: str) -> None:
    """B43: in a rolling upgrade the database comes first."""
    delay.document("db", "migrate")
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///")) as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    connection.close()
    assert delay.document("db", "check")["revision"] == "9999"
    assert delay.document("db", "migrate")["revision"] == "9999"
    assert delay("schedule", "orders", "--payload", "x", "--after", "60").code == 0


@pytest.mark.parametrize("words", [["db", "migrate"], ["db", "check"]])
def test_the_table_has_one_line_per_field(delay: CommandLine, words: list[str]) -> None:
    delay("db", "migrate")
    result = delay(*words)
    assert result.code == 0
    assert result.out.splitlines()[-1].split() == ["revision", HEAD]
