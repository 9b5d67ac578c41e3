"""The loop that finds out whether brokers can be reached."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import update

from airflow_delay_provider.brokers.ledger import broker_status
from airflow_delay_provider.brokers.ledger.broker_status import BrokerStatus
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.tables import broker as broker_table
from airflow_delay_provider.brokers.port import Broker, HasTopology, TopologyIssue
from airflow_delay_provider.dispatcher import check_brokers
from airflow_delay_provider.dispatcher.check_brokers import INTERVAL, CheckBrokers
from airflow_delay_provider.dispatcher.loop import Context
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.domain.exceptions import BrokerError
from tests.unit.brokers.ledger import rows
from tests.unit.brokers.ledger.rows import messages
from tools.servers.component import wait_for as wait_for_seconds

wait_for = partial(wait_for_seconds, seconds=30, interval=0.02)


class Remote(EmbeddedBroker, HasTopology):
    """A broker of which a test decides how it is."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Ledger(f"sqlite:///{folder / 'remote.db'}"))
        self.fails: Exception | None = None
        self.hangs = threading.Event()
        self.hangs.set()
        self.verifying = threading.Event()
        self.verifying.set()
        self.checks = 0
        self.issues = [TopologyIssue(text="queue a is missing"), TopologyIssue(text="use more", is_problem=False)]
        self.verified = 0
        self.closed = 0

    def check(self) -> str:
        self.checks += 1
        self.hangs.wait(60)
        if self.fails is not None:
            raise self.fails
        return "remote 1.0 answers;\nthe ladder is ready"

    def clock_skew(self) -> timedelta | None:
        return timedelta(seconds=2)

    def create_topology(self, channels: object = ()) -> str:
        raise NotImplementedError

    def require_topology(self) -> None:
        raise NotImplementedError

    def verify_topology(self) -> list[TopologyIssue]:
        self.verified += 1
        self.verifying.wait(60)
        return self.issues

    def delete_topology(self, *, even_if_messages_wait: bool = False) -> str:
        raise NotImplementedError

    def close(self) -> None:
        self.closed += 1
        super().close()


@pytest.fixture
def remotes(tmp_path: Path) -> dict[str, Remote]:
    found = {}
    for name in ("kafka", "rabbit", "held"):
        (tmp_path / name).mkdir()
        found[name] = Remote(tmp_path / name)
    return found


@pytest.fixture
def loops(ledger: Ledger, remotes: dict[str, Remote]) -> Iterator[Callable[[], CheckBrokers]]:
    opened: list[CheckBrokers] = []

    def open_broker(conn_id: str) -> Broker:
        return remotes[conn_id]

    def open_loop() -> CheckBrokers:
        config = DispatcherConfig(index=("rabbit",), kafka=("kafka",))
        opened.append(CheckBrokers(Context(ledger=ledger, clock=SystemClock(), config=config), open_broker))
        return opened[-1]

    yield open_loop
    for remote in remotes.values():
        remote.hangs.set()
        remote.verifying.set()
    for loop in opened:
        loop.close()


@pytest.fixture
def loop(loops: Callable[[], CheckBrokers]) -> CheckBrokers:
    return loops()


def statuses(ledger: Ledger) -> dict[str, BrokerStatus]:
    return {status.conn_id: status for status in rows.read(ledger, broker_status.read_all)}


def let_pass(ledger: Ledger, seconds: int) -> None:
    columns = (broker_table.c.checked_at_ms, broker_table.c.topology_verified_at_ms)
    older = update(broker_table).values({column: column - seconds * 1000 for column in columns})
    ledger.transact(lambda c: c.execute(older))


def test_brokers_that_are_indexed_served_or_sent_to_are_checked(ledger: Ledger, loop: CheckBrokers):
    rows.insert(ledger, messages(1000), destination="held")
    assert INTERVAL.total_seconds() - 2 < loop.run_once() <= INTERVAL.total_seconds()
    wait_for(lambda: len(statuses(ledger)) == 3, what="the first checks")
    wait_for(lambda: all(each.clock_skew for each in statuses(ledger).values()), what="their clocks")
    assert list(statuses(ledger)) == ["held", "kafka", "rabbit"]
    for status in statuses(ledger).values():
        assert (status.reachable, status.error) == (True, None)
        assert status.description == "remote 1.0 answers; the ladder is ready"
        assert status.clock_skew == timedelta(seconds=2)
        assert status.skew_measured_at is not None
        assert not status.is_stale


def test_the_topology_is_verified_now_and_then(ledger: Ledger, loop: CheckBrokers, remotes: dict[str, Remote]):
    loop.run_once()
    verified = wait_for(
        lambda: (status := statuses(ledger).get("rabbit")) and status.topology_verified_at and status,
        what="a verified topology",
    )
    assert verified.topology_issues == tuple(remotes["rabbit"].issues)
    let_pass(ledger, 5)
    loop.run_once()
    wait_for(lambda: remotes["rabbit"].checks == 2, what="the second check")
    assert remotes["rabbit"].verified == 1
    let_pass(ledger, 300)
    loop.run_once()
    wait_for(lambda: remotes["rabbit"].verified == 2, what="the next verification")


def test_verifying_delays_no_check(ledger: Ledger, loop: CheckBrokers, remotes: dict[str, Remote]):
    remotes["rabbit"].verifying.clear()
    loop.run_once()
    wait_for(lambda: remotes["rabbit"].verified, what="a verification")
    for n in (2, 3):
        let_pass(ledger, 5)
        loop.run_once()
        wait_for(lambda n=n: remotes["rabbit"].checks == n, what="another check")
    assert remotes["rabbit"].verified == 1
    remotes["rabbit"].verifying.set()
    wait_for(lambda: statuses(ledger)["rabbit"].topology_issues, what="the issues")


def test_a_broker_that_is_down_is_reported_and_then_found_again(
    ledger: Ledger, loop: CheckBrokers, remotes: dict[str, Remote]
):
    loop.run_once()
    wait_for(lambda: len(statuses(ledger)) == 2, what="the first checks")
    remotes["kafka"].fails = BrokerError("Kafka at nowhere does not answer;\nstart it")
    let_pass(ledger, 5)
    loop.run_once()
    wait_for(lambda: not statuses(ledger)["kafka"].reachable, what="the failure")
    failed = statuses(ledger)["kafka"]
    assert failed.error == "Kafka at nowhere does not answer; start it"
    assert failed.description == "remote 1.0 answers; the ladder is ready"
    assert statuses(ledger)["rabbit"].reachable
    assert remotes["kafka"].closed, "so that the connection is looked up again"
    remotes["kafka"].fails = None
    let_pass(ledger, 5)
    loop.run_once()
    wait_for(lambda: statuses(ledger)["kafka"].reachable, what="the recovery")
    assert statuses(ledger)["kafka"].error is None


def test_a_broker_that_hangs_is_reported_and_delays_no_other(
    ledger: Ledger, loop: CheckBrokers, remotes: dict[str, Remote], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(check_brokers, "SLOW_SECONDS", 0.2)
    monkeypatch.setattr(check_brokers, "WAIT_SECONDS", 0.3)
    remotes["kafka"].hangs.clear()
    began = time.monotonic()
    for n in range(1, 4):
        let_pass(ledger, 5)
        loop.run_once()
        wait_for(lambda n=n: remotes["rabbit"].checks == n, what="the check of the other broker")
        wait_for(lambda: statuses(ledger)["rabbit"].reachable, what="its status")
    assert time.monotonic() - began < 10
    assert remotes["kafka"].checks == 1, "one check at a time"
    hanging = statuses(ledger)["kafka"]
    assert not hanging.reachable
    assert hanging.error is not None
    assert hanging.error.startswith("the broker has not answered for ")
    remotes["kafka"].hangs.set()
    wait_for(lambda: statuses(ledger)["kafka"].reachable, what="the late answer")


def test_an_error_of_another_package_is_reported_without_its_text(
    ledger: Ledger, loop: CheckBrokers, remotes: dict[str, Remote], caplog: pytest.LogCaptureFixture
):
    remotes["kafka"].fails = RuntimeError("amqp://user:secret@host")
    with caplog.at_level(logging.WARNING):
        loop.run_once()
        wait_for(lambda: "kafka" in statuses(ledger), what="the failure")
    assert statuses(ledger)["kafka"].error == "RuntimeError; see the log of the dispatcher"
    assert "Connection kafka does not work: RuntimeError in check (test_check_brokers.py, line " in caplog.text
    assert "secret" not in caplog.text


def test_a_connection_that_does_not_exist_is_reported(ledger: Ledger, loop: CheckBrokers):
    rows.insert(ledger, messages(1000), destination="no-such")
    loop.run_once()
    wait_for(lambda: "no-such" in statuses(ledger), what="the failure")
    assert statuses(ledger)["no-such"].error == "KeyError; see the log of the dispatcher"


def test_of_several_dispatchers_one_checks(
    ledger: Ledger, loops: Callable[[], CheckBrokers], remotes: dict[str, Remote]
):
    first, second = loops(), loops()
    first.run_once()
    wait_for(lambda: len(statuses(ledger)) == 2, what="the first checks")
    second.run_once()
    assert remotes["rabbit"].checks == 1
    let_pass(ledger, 5)
    second.run_once()
    wait_for(lambda: remotes["rabbit"].checks == 2, what="the second check")


def test_the_status_of_a_broker_that_nobody_checks_is_stale_and_then_forgotten(ledger: Ledger):
    ledger.transact(broker_status.write_failed, "old", error="no\0" + "x" * 1000)
    assert len(statuses(ledger)["old"].error or "") == broker_status.MAX_LENGTH
    let_pass(ledger, 31)
    assert statuses(ledger)["old"].is_stale
    ledger.transact(broker_status.forget_old)
    assert list(statuses(ledger)) == ["old"]
    let_pass(ledger, 86_400)
    ledger.transact(broker_status.forget_old)
    assert statuses(ledger) == {}


def test_closing_closes_the_brokers(ledger: Ledger, loop: CheckBrokers, remotes: dict[str, Remote]):
    loop.run_once()
    wait_for(lambda: len(statuses(ledger)) == 2, what="the first checks")
    before = {name: remote.closed for name, remote in remotes.items()}
    loop.close()
    assert all(remotes[name].closed > before[name] for name in ("kafka", "rabbit"))
