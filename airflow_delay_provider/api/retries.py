"""Routes that show Spark tasks that wait for a retry, and the attempts of a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request

from airflow_delay_provider.api import airflow_tasks
from airflow_delay_provider.api.auth import CurrentPermissions, mask_secrets
from airflow_delay_provider.api.ledgers import RequestedLedger
from airflow_delay_provider.api.messages import PageSize, PageToken, RequestedFilter, criteria_of
from airflow_delay_provider.api.models import MapIndex, Text
from airflow_delay_provider.api.overview_models import Budget, Circuit, Retry, RetryPage, SparkAttempt, SparkAttempts
from airflow_delay_provider.api.problems import describes
from airflow_delay_provider.api.representation import Presenter, summary_of
from airflow_delay_provider.brokers.ledger import cluster_circuits, listing, search
from airflow_delay_provider.brokers.ledger.cluster_circuits import Outage
from airflow_delay_provider.brokers.ledger.records import MessageRecord
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import Origin
from airflow_delay_provider.spark.retries import History
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, Ticket

router = APIRouter(tags=["Spark retries"])


@router.get("/retries", responses=describes(404))
def list_retries(
    request: Request,
    opened: RequestedLedger,
    permissions: CurrentPermissions,
    given: RequestedFilter,
    page: PageToken = None,
    limit: PageSize = 50,
) -> RetryPage:
    """List Spark tasks that wait for their next submission, by its time.

    The channel of their tickets is ``delay.retries`` unless you give another one. Expedite a ticket to retry now, and
    cancel it to give up.
    """
    presenter = Presenter(request, opened, permissions)
    criteria = criteria_of(opened, given, State.SCHEDULED)
    criteria = replace(criteria, channel=given.channel or DEFAULT_CHANNEL)
    with opened.ledger.read() as connection:
        found = search.search(connection, criteria, token=page, size=limit, is_visible=presenter.may_see)
        tickets = _read_tickets(
            found.records, listing.get_payloads(connection, [each.message.id for each in found.records])
        )
        outages = cluster_circuits.find_outages(connection)
    histories = airflow_tasks.read_histories([ticket.origin for _, ticket in tickets])
    return RetryPage(
        retries=[
            _retry(presenter, record, ticket, outages.get(ticket.cluster), histories.get(ticket.origin))
            for record, ticket in tickets
        ],
        **presenter.page(found),
    )


@router.get("/attempts", responses=describes(404))
def list_attempts(
    permissions: CurrentPermissions,
    dag_id: Annotated[Text, Query()],
    run_id: Annotated[Text, Query()],
    task_id: Annotated[Text, Query()],
    map_index: Annotated[MapIndex, Query()] = -1,
) -> SparkAttempts:
    """Return the Spark attempts of one task instance, also after they ended."""
    if not permissions.may_read(dag_id):
        raise HTTPException(403, "You may not read the task instances of this DAG.")
    origin = Origin(dag_id=dag_id, run_id=run_id, task_id=task_id, map_index=map_index)
    return attempts_of(airflow_tasks.read_histories([origin]).get(origin))


def attempts_of(history: History | None) -> SparkAttempts:
    """Return the attempts of a history."""
    if history is None:
        return SparkAttempts(phase=None, attempts=[], budget={})
    return SparkAttempts(
        phase=history.phase.value,
        attempts=[
            SparkAttempt(
                number=each.number,
                started_at=each.started_at,
                ended_at=each.ended_at,
                verdict=None if each.verdict is None else each.verdict.value,
                rule=each.rule,
                reason=mask_secrets(each.reason),
                exit_code=each.exit_code,
            )
            for each in history.attempts
        ],
        budget={kind: Budget(used=used, limit=limit) for kind, (used, limit) in history.budget.items()},
    )


def circuit_of(cluster: str, outage: Outage | None) -> Circuit:
    """Return the circuit of a cluster."""
    return Circuit(
        cluster=mask_secrets(cluster),
        is_open=outage is not None,
        down_since=None if outage is None else outage.since,
        failed_checks=0 if outage is None else outage.failed_checks,
        next_check_at=None if outage is None else outage.next_check_at,
    )


def _read_tickets(records: Sequence[MessageRecord], payloads: dict[str, bytes]) -> list[tuple[MessageRecord, Ticket]]:
    """Return the messages of the channel that are tickets of the tasks that scheduled them."""
    found = [
        (each, Ticket.from_message(replace(each.message, payload=payloads.get(each.message.id, b""))))
        for each in records
    ]
    # Anybody can write a payload: another origin would show the attempts of tasks that the reader may not see.
    return [(each, ticket) for each, ticket in found if ticket is not None and ticket.origin == each.message.origin]


def _retry(
    presenter: Presenter, record: MessageRecord, ticket: Ticket, outage: Outage | None, history: History | None
) -> Retry:
    return Retry(
        message=summary_of(presenter, record),
        attempt=ticket.attempt,
        verdict=ticket.verdict,
        reason=mask_secrets(ticket.reason),
        waits_for=ticket.waits_for.value,
        extensions=ticket.extension,
        began_at=ticket.began_at,
        next_try_at=record.message.deliver_at,
        circuit=circuit_of(ticket.cluster, outage),
        history=attempts_of(history),
    )
