"""Tickets of Spark retries for tests: issue them, and find them in the ledger."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from sqlalchemy import select

from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.records import MESSAGE_COLUMNS, message_of
from airflow_delay_provider.brokers.ledger.tables import scheduled_message
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import Origin
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, Ticket
from airflow_delay_provider.triggers.spark import RetryTicketTrigger

HOUR = timedelta(hours=1)


def issue(broker: EmbeddedBroker, *, map_index: int = -1, after: timedelta = HOUR / 2) -> Ticket:
    """Schedule the ticket of a second attempt, as an operator does."""
    now = broker.clock.now()
    ticket = Ticket(
        origin=Origin(dag_id="sales", run_id="manual__1", task_id="load", map_index=map_index),
        began_at=now,
        attempt=2,
        verdict="transient",
        reason="a source refused",
        cluster="spark://somewhere:7077",
        deliver_at=now + after,
    )
    broker.schedule([ticket.as_message(DEFAULT_CHANNEL)])
    return ticket


def trigger_of(ticket: Ticket, *, give_up_after: timedelta = HOUR, **options: Any) -> RetryTicketTrigger:
    """The trigger as the triggerer makes it: from stored arguments."""
    given = RetryTicketTrigger(
        ticket=ticket.as_json(),
        since="",
        give_up_at=(ticket.began_at + give_up_after).isoformat(),
        spark_conn_id="spark_default",
        **options,
    )
    return restarted(given)


def restarted(trigger: RetryTicketTrigger) -> RetryTicketTrigger:
    """The same trigger after the triggerer was restarted."""
    _, arguments = trigger.serialize()
    return RetryTicketTrigger(**json.loads(json.dumps(arguments)))


def tickets_in(broker: EmbeddedBroker, *states: State) -> list[Ticket]:
    """Tickets of the ledger in these states, by their number of extensions and due time."""
    wanted = scheduled_message.c.state.in_([state.value for state in states or State])
    with broker.ledger.read() as connection:
        rows = connection.execute(select(*MESSAGE_COLUMNS).where(wanted)).all()
    found = [Ticket.from_message(message_of(row)) for row in rows]
    return sorted((each for each in found if each is not None), key=lambda each: (each.extension, each.deliver_at))
