"""Routes that list and show messages."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from sqlalchemy import Connection

from airflow_delay_provider.api import airflow_tasks
from airflow_delay_provider.api.auth import CurrentPermissions
from airflow_delay_provider.api.ledgers import OpenLedger, RequestedLedger
from airflow_delay_provider.api.models import (
    ChannelCounts,
    Channels,
    CountLinks,
    Counts,
    DeadLetter,
    DeadLetterPage,
    History,
    MapIndex,
    MessageDetail,
    MessageFilter,
    MessagePage,
    Moment,
    Overdue,
    StateCount,
    Text,
)
from airflow_delay_provider.api.problems import describes
from airflow_delay_provider.api.representation import (
    Presenter,
    api_path,
    history_entry,
    masked_headers,
    name_of,
    payloads_are_shown,
    preview,
    summary_of,
)
from airflow_delay_provider.brokers.ledger import delivery, journal, listing, search
from airflow_delay_provider.brokers.ledger.heartbeats import read_dispatchers
from airflow_delay_provider.brokers.ledger.projection import position_of
from airflow_delay_provider.brokers.ledger.records import MessageRecord
from airflow_delay_provider.brokers.ledger.tables import EMBEDDED
from airflow_delay_provider.domain.clock import ceil_ms, from_ms
from airflow_delay_provider.domain.exceptions import UnknownMessageError
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, State
from airflow_delay_provider.domain.message import require_message_id

router = APIRouter(tags=["messages"])

#: Limits the history of a message that was requeued many times.
SHOWN_ENTRIES = 200


def _filter_of_request(
    channel: Annotated[Text | None, Query()] = None,
    connection: Annotated[Text | None, Query(description="The connection of the message's broker.")] = None,
    dag_id: Annotated[Text | None, Query()] = None,
    run_id: Annotated[Text | None, Query()] = None,
    task_id: Annotated[Text | None, Query()] = None,
    map_index: Annotated[MapIndex | None, Query()] = None,
    due_from: Annotated[Moment | None, Query()] = None,
    due_to: Annotated[Moment | None, Query(description="Exclusive.")] = None,
    search: Annotated[Text | None, Query(description="Part of the id.")] = None,
) -> MessageFilter:
    return MessageFilter(
        channel=channel,
        connection=connection,
        dag_id=dag_id,
        run_id=run_id,
        task_id=task_id,
        map_index=map_index,
        due_from=due_from,
        due_to=due_to,
        search=search,
    )


RequestedFilter = Annotated[MessageFilter, Depends(_filter_of_request)]
PageToken = Annotated[Text | None, Query(description="A token from ``next`` or ``prev``.")]
PageSize = Annotated[int, Query(ge=1, le=listing.MAX_PAGE_SIZE)]


def criteria_of(opened: OpenLedger, given: MessageFilter, *states: State) -> search.MessageFilter:
    """Return the criteria for the ledger."""
    return search.MessageFilter(
        states=states,
        channel=given.channel,
        destination=opened.destination_of(given.connection),
        dag_id=given.dag_id,
        run_id=given.run_id,
        task_id=given.task_id,
        map_index=given.map_index,
        due_from_ms=None if given.due_from is None else ceil_ms(given.due_from),
        due_to_ms=None if given.due_to is None else ceil_ms(given.due_to),
        id_contains=given.search,
    )


@router.get("/messages", responses=describes(404))
def list_messages(
    request: Request,
    opened: RequestedLedger,
    permissions: CurrentPermissions,
    given: RequestedFilter,
    state: Annotated[list[Text] | None, Query(description="Names or numbers; by default all states.")] = None,
    page: PageToken = None,
    limit: PageSize = 50,
) -> MessagePage:
    """List messages of DAGs that you may read, ordered by delivery time."""
    presenter = Presenter(request, opened, permissions)
    criteria = criteria_of(opened, given, *(State.parse(text) for text in state or ()))
    with opened.ledger.read() as connection:
        found = search.search(connection, criteria, token=page, size=limit, is_visible=presenter.may_see)
        is_listed = not opened.is_copy or _is_indexed(connection, opened.conn_id)
    return MessagePage(
        messages=[summary_of(presenter, each) for each in found.records],
        notice=None if is_listed else _not_indexed(opened.conn_id),
        **presenter.page(found),
    )


# An id may contain slashes.
@router.get("/messages/{message_id:path}", responses=describes(404))
def get_message(
    request: Request, opened: RequestedLedger, permissions: CurrentPermissions, message_id: str
) -> MessageDetail:
    """Return one message with its content."""
    presenter = Presenter(request, opened, permissions)
    record = find_record(opened, presenter, message_id)
    with opened.ledger.read() as connection:
        dispatchers = read_dispatchers(connection)
    message = record.message
    return MessageDetail(
        **presenter.summary(record),
        headers=masked_headers(message),
        payload=preview(message),
        task_link=presenter.task_link(message.origin),
        is_awaited=record.state is State.SCHEDULED
        and message.origin is not None
        and airflow_tasks.is_deferred(message.origin),
        warning=presenter.warning(record, dispatchers),
        actions=presenter.possible_actions(record),
        can_download=payloads_are_shown() and presenter.may_edit(record),
    )


@router.get("/history/{message_id:path}", responses=describes(404))
def get_history(request: Request, opened: RequestedLedger, permissions: CurrentPermissions, message_id: str) -> History:
    """Return what happened to a message, oldest first."""
    find_record(opened, Presenter(request, opened, permissions), message_id)
    with opened.ledger.read() as connection:
        entries = listing.get_history(connection, message_id)
    shown = entries[-SHOWN_ENTRIES:]
    return History(
        message_id=message_id, entries=[history_entry(each) for each in shown], omitted=len(entries) - len(shown)
    )


@router.get(
    "/payload/{message_id:path}",
    response_class=Response,
    responses=describes(404) | {200: {"content": {"application/octet-stream": {}}}},
)
def download_payload(
    request: Request, opened: RequestedLedger, permissions: CurrentPermissions, message_id: str
) -> Response:
    """Return the whole payload, unmasked, to users who may change the message."""
    presenter = Presenter(request, opened, permissions)
    record = find_record(opened, presenter, message_id)
    if not payloads_are_shown():
        raise HTTPException(403, "[delay] show_payloads hides payloads.")
    if not presenter.may_edit(record):
        raise HTTPException(403, "Only users who may change a message can download its payload.")
    headers = {
        "Content-Disposition": 'attachment; filename="payload.bin"',
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
    return Response(record.message.payload, media_type="application/octet-stream", headers=headers)


def find_record(opened: OpenLedger, presenter: Presenter, message_id: str) -> MessageRecord:
    """Return a message with its payload; raise 403 for users who may not see its task."""
    require_message_id(message_id)
    with opened.ledger.read() as connection:
        try:
            record = listing.get(connection, message_id, destination=opened.destination)
        except UnknownMessageError as error:
            if not opened.is_copy:
                raise
            is_indexed = _is_indexed(connection, opened.conn_id)
            raise HTTPException(404, _why_not_listed(message_id, opened.conn_id, is_indexed=is_indexed)) from error
    if not presenter.may_see(record):
        raise HTTPException(403, "You may not read the task instances of this message's DAG.")
    return record


def _why_not_listed(message_id: str, conn_id: str, *, is_indexed: bool) -> str:
    if is_indexed:
        return (
            f"The index of connection {conn_id!r} has no message {message_id!r}. It is some seconds behind the broker,"
            " and finished messages leave it after [delay] retention_days."
        )
    return _not_indexed(conn_id)


def _is_indexed(connection: Connection, conn_id: str) -> bool:
    return position_of(connection, conn_id) != FROM_THE_START


def _not_indexed(conn_id: str) -> str:
    return (
        f"The broker of connection {conn_id!r} holds its messages itself, and no dispatcher copies its journal for this"
        f" page. Messages are delivered nevertheless. To list them, run `airflow delay dispatcher --index {conn_id}`."
    )


@router.get("/counts", responses=describes(404))
def count_messages(
    request: Request,
    opened: RequestedLedger,
    channel: Annotated[Text | None, Query()] = None,
    connection: Annotated[Text | None, Query()] = None,
) -> Counts:
    """Count messages by state. Counts include messages of DAGs that you may not read."""
    destination = opened.destination_of(connection)
    with opened.ledger.read() as database:
        counts = listing.count_by_state(database, channel=channel, destination=destination)
        if destination == EMBEDDED and channel is None:
            due_ms = delivery.next_due_ms(database)
            next_due = None if due_ms is None else from_ms(due_ms)
        else:
            next_due = listing.next_scheduled_at(database, channel=channel, destination=destination or None)
        overdue, oldest_ms = search.count_overdue(
            database, now_ms=opened.now_ms(), channel=channel, destination=destination
        )
    return Counts(
        counts={
            name_of(state): StateCount(
                count=count,
                links=CountLinks(
                    messages=api_path(request, "messages", state=state.value, channel=channel, connection=connection)
                ),
            )
            for state, count in counts.items()
        },
        next_scheduled_message_at=next_due,
        overdue=Overdue(
            count=min(overdue, search.MOST_OVERDUE),
            is_exact=overdue <= search.MOST_OVERDUE,
            oldest_deliver_at=None if oldest_ms is None else from_ms(oldest_ms),
        ),
        now=opened.now(),
    )


@router.get("/channels", responses=describes(404))
def list_channels(
    opened: RequestedLedger,
    connection: Annotated[Text | None, Query()] = None,
    after: Annotated[Text | None, Query(description="Continue after this channel.")] = None,
    limit: PageSize = 100,
) -> Channels:
    """List channels with their messages by state."""
    with opened.ledger.read() as database:
        found = listing.count_by_channel(
            database, destination=opened.destination_of(connection), after=after, limit=limit + 1
        )
    names = list(found)[:limit]
    return Channels(
        channels=[
            ChannelCounts(channel=name, counts={name_of(state): n for state, n in found[name].items()})
            for name in names
        ],
        next=names[-1] if len(found) > limit else None,
    )


@router.get("/dead-letters", responses=describes(404))
def list_dead_letters(
    request: Request,
    opened: RequestedLedger,
    permissions: CurrentPermissions,
    given: RequestedFilter,
    page: PageToken = None,
    limit: PageSize = 50,
) -> DeadLetterPage:
    """List dead messages of DAGs that you may read, with the reason, ordered by delivery time."""
    presenter = Presenter(request, opened, permissions)
    criteria = criteria_of(opened, given, State.DEAD)
    with opened.ledger.read() as connection:
        found = search.search(connection, criteria, token=page, size=limit, is_visible=presenter.may_see)
        ends = journal.last_ends(connection, [record.message.id for record in found.records])
    return DeadLetterPage(
        messages=[_dead_letter(presenter, record, ends) for record in found.records], **presenter.page(found)
    )


def _dead_letter(presenter: Presenter, record: MessageRecord, ends: Any) -> DeadLetter:
    end = ends.get(record.message.id)
    entry = None if end is None else history_entry(end)
    return DeadLetter(
        **presenter.summary(record),
        reason=None if entry is None else entry.reason,
        died_at=record.updated_at if entry is None else entry.at,
    )
