"""Heartbeats: who serves the ledger, who is gone, and what that means for waiting messages."""

from __future__ import annotations

from datetime import timedelta

import pytest

from airflow_delay_provider.brokers.ledger import heartbeats
from airflow_delay_provider.brokers.ledger.database import Ledger, read_identity
from airflow_delay_provider.brokers.ledger.heartbeats import (
    GONE_AFTER,
    KEPT,
    Machine,
    find_gap,
    find_kafka_gap,
    this_machine,
)
from airflow_delay_provider.domain.exceptions import ConfigurationError
from tests.heartbeats import OWNER, WELL, dispatchers_of, let_pass, write_heartbeat
from tests.unit.brokers.ledger import rows
from tests.unit.brokers.ledger.rows import messages

ELSEWHERE = Machine(host=this_machine().host, boot_id="the kernel of another machine", booted_at_ms=0)


def test_a_dispatcher_is_alive_as_long_as_its_heartbeats_come(ledger: Ledger):
    """B40"""
    assert dispatchers_of(ledger) == []
    write_heartbeat(ledger)
    [first] = dispatchers_of(ledger)
    assert (first.owner, first.status, first.started_at) == (OWNER, "alive", first.seen_at)
    let_pass(ledger, GONE_AFTER - timedelta(seconds=10))
    assert dispatchers_of(ledger)[0].is_alive
    let_pass(ledger, timedelta(seconds=10))
    assert dispatchers_of(ledger)[0].status == "gone"
    write_heartbeat(ledger)
    [again] = dispatchers_of(ledger)
    assert (again.status, again.started_at) == ("alive", first.started_at)


def test_a_dispatcher_that_ended_as_it_should_is_known_as_stopped(ledger: Ledger):
    write_heartbeat(ledger)
    ledger.transact(lambda c: heartbeats.mark_stopped(c, OWNER))
    [stopped] = dispatchers_of(ledger)
    assert (stopped.status, stopped.is_alive, stopped.stopped_at) == ("stopped", False, stopped.seen_at)


def test_dispatchers_that_are_long_gone_are_forgotten(ledger: Ledger):
    write_heartbeat(ledger, owner="old")
    let_pass(ledger, KEPT)
    write_heartbeat(ledger, owner="new")
    assert [each.owner for each in dispatchers_of(ledger)] == ["new", "old"]
    ledger.transact(heartbeats.forget_gone)
    assert [each.owner for each in dispatchers_of(ledger)] == ["new"]


def test_without_a_dispatcher_messages_are_not_served(ledger: Ledger):
    """B41"""
    never = find_gap(dispatchers_of(ledger))
    assert never is not None
    assert never.describe("run it") == "no dispatcher has ever been seen in this ledger; start one with `run it`"
    write_heartbeat(ledger)
    assert find_gap(dispatchers_of(ledger)) is None
    assert find_gap(dispatchers_of(ledger), destination="rabbit") is None, "its loop begins when messages wait"
    let_pass(ledger, GONE_AFTER)
    seen_at = dispatchers_of(ledger)[0].seen_at
    for gap in (find_gap(dispatchers_of(ledger)), find_gap(dispatchers_of(ledger), destination="rabbit")):
        assert gap is not None
        assert gap.is_absence
        assert f"no dispatcher has been seen since {seen_at:%Y-%m-%d %H:%M:%S} UTC ({OWNER} sent its" in gap.problem


def test_a_loop_that_stands_still_is_a_gap_although_the_dispatcher_runs(ledger: Ledger):
    """B40, B41"""
    stuck = {**WELL, "well": False, "succeeded_ms_ago": 90_000}
    write_heartbeat(ledger, loops={"dispatch_embedded": stuck, "dispatch_to_brokers:rabbit": WELL})
    gap = find_gap(dispatchers_of(ledger))
    assert gap is not None
    assert gap.describe("run it").startswith(
        f"dispatcher {OWNER} runs, but its loop dispatch_embedded has not finished a run"
    )
    assert "start one" not in gap.describe("run it")
    assert find_gap(dispatchers_of(ledger), destination="rabbit") is None
    write_heartbeat(ledger, owner="another")
    assert find_gap(dispatchers_of(ledger)) is None, "one that works is enough"


def test_only_a_dispatcher_with_this_connection_serves_its_ladder(ledger: Ledger):
    write_heartbeat(ledger)
    gap = find_kafka_gap(dispatchers_of(ledger), "kafka")
    assert gap is not None
    assert gap.problem == "no dispatcher that serves the ladder of 'kafka' has ever been seen in this ledger"
    failing = {**WELL, "well": False, "failures": 1, "error": "BrokerError: no node answers"}
    write_heartbeat(
        ledger, owner="kafka-dispatcher", kafka_connections=["kafka"], loops={"dispatch_kafka:kafka": failing}
    )
    gap = find_kafka_gap(dispatchers_of(ledger), "kafka")
    assert gap is not None
    assert gap.problem.endswith("UTC: BrokerError: no node answers")
    write_heartbeat(ledger, owner="kafka-dispatcher", kafka_connections=["kafka"], loops={"dispatch_kafka:kafka": WELL})
    assert find_kafka_gap(dispatchers_of(ledger), "kafka") is None


def test_a_ledger_has_an_identity(ledger: Ledger):
    """B42"""
    first = rows.read(ledger, read_identity)
    assert (first.host, len(first.id)) == (this_machine().host, 36)
    assert rows.read(ledger, read_identity) == first


def test_a_sqlite_file_that_a_dispatcher_on_another_machine_serves_is_refused(sqlite_url: str):
    """A12: the other machine would not see what is written here, whatever the two are called."""
    ours = Ledger(sqlite_url)
    write_heartbeat(ours, machine=ELSEWHERE)
    again = Ledger(sqlite_url)
    for call in (lambda: rows.insert(again, messages(1)), lambda: rows.count(again)):
        with pytest.raises(
            ConfigurationError, match=r"SQLite works on one machine only: set \[delay\] ledger_url to a P"
        ):
            call()
    let_pass(ours, GONE_AFTER)
    rows.insert(again, messages(1))
    for ledger in (ours, again):
        ledger.close()


def test_a_heartbeat_from_before_this_machine_was_started_proves_no_other_machine(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
):
    ours = Ledger(sqlite_url)
    write_heartbeat(ours, machine=ELSEWHERE)
    [seen] = dispatchers_of(ours)
    started = Machine(host="host", boot_id="ours", booted_at_ms=int(seen.seen_at.timestamp() * 1000) + 1000)
    monkeypatch.setattr("airflow_delay_provider.brokers.ledger.database.this_machine", lambda: started)
    again = Ledger(sqlite_url)
    rows.insert(again, messages(1))
    for ledger in (ours, again):
        ledger.close()


def test_postgresql_serves_any_number_of_machines(postgres_url: str):
    ours, again = Ledger(postgres_url), Ledger(postgres_url)
    write_heartbeat(ours, machine=ELSEWHERE)
    rows.insert(again, messages(1))
    for ledger in (ours, again):
        ledger.close()
