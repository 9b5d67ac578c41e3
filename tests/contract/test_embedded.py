from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from airflow_delay_provider.brokers.base import Broker
from airflow_delay_provider.brokers.embedded import EmbeddedBroker
from airflow_delay_provider.domain.schedule import Limits
from airflow_delay_provider.ledger.database import Ledger
from airflow_delay_provider.testing.kit import DelayTestKit
from tests.contract.broker_contract import BrokerContract
from tests.contract.harness import BrokerHarness
from tests.databases import fresh_database


class EmbeddedHarness(BrokerHarness):
    """The embedded broker on a clock that is set, so no test waits."""

    patience = timedelta(seconds=5)

    def __init__(self, url: str) -> None:
        self.kit = DelayTestKit(url)
        super().__init__()

    def make_broker(self, limits: Limits | None) -> Broker:
        return EmbeddedBroker(Ledger(self.kit.url), limits=limits, clock=self.kit.clock)

    def pass_time(self, delta: timedelta) -> None:
        self.kit.advance(delta)

    def dispatch(self) -> None:
        self.kit.dispatch()

    def close(self) -> None:
        super().close()
        self.kit.close()


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def shared_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One database for all tests here: names are fresh, as they must be on any broker."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('contract') / 'ledger.db'}"
        return
    with fresh_database(template=request.getfixturevalue("migrated_postgres")) as url:
        yield url


@pytest.fixture
def harness(shared_url: str) -> Iterator[EmbeddedHarness]:
    harness = EmbeddedHarness(shared_url)
    yield harness
    harness.close()


class TestEmbeddedBroker(BrokerContract):
    """A5, A19, A22, A31"""
