"""The databases of the contract suites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from airflow_delay_provider.brokers.ledger.database import Ledger
from tests.databases import fresh_database


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def shared_ledger(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    """One database for all tests of a file: names are fresh, as they must be on any broker."""
    with ExitStack() as stack:
        if request.param == "sqlite":
            url = f"sqlite:///{tmp_path_factory.mktemp('contract') / 'ledger.db'}"
        else:
            url = stack.enter_context(fresh_database(template=request.getfixturevalue("migrated_postgres")))
        ledger = Ledger(url)
        stack.callback(ledger.close)
        yield ledger
