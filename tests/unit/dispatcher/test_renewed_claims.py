"""A broker that is slow to confirm gets its messages once, also with several dispatchers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from airflow_delay_provider.brokers.ledger import delivery
from airflow_delay_provider.brokers.ledger.claims import renew
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.port import Receipt
from airflow_delay_provider.dispatcher.dispatch_to_brokers import DispatchToBrokers
from airflow_delay_provider.dispatcher.loop import Context
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import Message
from tests.unit.brokers.ledger import rows
from tests.unit.brokers.ledger.rows import NOW_MS
from tools.servers.component import wait_for

CLAIM = timedelta(milliseconds=600)


class SlowBroker(EmbeddedBroker):
    """Confirms when it may."""

    def __init__(self) -> None:
        super().__init__(Ledger("sqlite://"))
        self.began = threading.Event()
        self.may_confirm = threading.Event()
        self.sent: list[str] = []

    def send(self, messages: Sequence[Message]) -> list[Receipt]:
        self.sent += [message.id for message in messages]
        self.began.set()
        assert self.may_confirm.wait(60)
        return super().send(messages)


def rescue(ledger: Ledger) -> int:
    now_ms = int(SystemClock().now().timestamp() * 1000)
    return ledger.transact(delivery.rescue_stale, now_ms=now_ms, limit=10)


def claimed_until_ms(ledger: Ledger) -> int:
    with ledger.read() as connection:
        query = "SELECT coalesce(max(claimed_until_ms), 0) FROM delay_scheduled_message"
        return int(connection.exec_driver_sql(query).scalar_one())


def test_a_claim_lasts_as_long_as_the_broker_takes_to_confirm(context: Context, ledger: Ledger) -> None:
    """B32, B61"""
    slow = SlowBroker()
    context = replace(context, clock=SystemClock(), config=replace(context.config, claim=CLAIM))
    message = Message(channel="c", payload=b"", deliver_at=SystemClock().now())
    rows.insert(ledger, [message], destination="there")
    sending = threading.Thread(target=DispatchToBrokers(context, "there", lambda _: slow).run_once)
    sending.start()
    try:
        assert slow.began.wait(60)
        first = claimed_until_ms(ledger)
        wait_for(lambda: claimed_until_ms(ledger) > first + 600, what="a claim that lasts longer", seconds=20)
    finally:
        slow.may_confirm.set()
        sending.join(60)
    assert slow.sent == [message.id]
    assert rows.count(ledger) == {State.DISPATCHED: 1}
    assert claimed_until_ms(ledger) == 0
    assert rescue(ledger) == 0
    slow.close()


@pytest.mark.parametrize("owner", ["another", "one"])
def test_only_the_owner_renews_a_claim(ledger: Ledger, owner: str) -> None:
    rows.insert(ledger, rows.messages(-1), destination="there")
    claims = ledger.transact(
        delivery.claim_due, destination="there", owner="one", now_ms=NOW_MS, until_ms=NOW_MS + 1000, limit=1
    )
    ledger.transact(renew, [each.seq for each in claims], owner=owner, until_ms=NOW_MS + 5000)
    assert claimed_until_ms(ledger) == NOW_MS + (5000 if owner == "one" else 1000)


def test_a_claim_that_was_given_back_is_not_renewed(ledger: Ledger) -> None:
    rows.insert(ledger, rows.messages(-1), destination="there")
    claims = ledger.transact(
        delivery.claim_due, destination="there", owner="one", now_ms=NOW_MS, until_ms=NOW_MS + 1000, limit=1
    )
    ledger.transact(delivery.give_back, claims, owner="one", now_ms=NOW_MS)
    ledger.transact(renew, [each.seq for each in claims], owner="one", until_ms=NOW_MS + 5000)
    assert claimed_until_ms(ledger) == 0
