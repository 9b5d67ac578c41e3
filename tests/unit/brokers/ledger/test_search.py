from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise

import pytest
from sqlalchemy import update

from airflow_delay_provider.brokers.ledger import search as searching
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.records import MessageRecord
from airflow_delay_provider.brokers.ledger.search import Found, MessageFilter, count_overdue, search
from airflow_delay_provider.brokers.ledger.tables import EMBEDDED, scheduled_message
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import Message, Origin
from tests.unit.brokers.ledger import rows
from tests.unit.brokers.ledger.rows import NOW_MS

CHANNELS = ("invoices", "orders")
ORIGINS = (
    None,
    Origin(dag_id="pay", run_id="r1", task_id="remind"),
    Origin(dag_id="pay", run_id="r1", task_id="remind", map_index=3),
    Origin(dag_id="pay", run_id="r2", task_id="ask"),
    Origin(dag_id="ship", run_id="r1", task_id="remind"),
)
FILTERS = [
    MessageFilter(),
    MessageFilter(states=[State.SCHEDULED]),
    MessageFilter(states=[State.DEAD, State.CANCELLED]),
    MessageFilter(channel="orders"),
    MessageFilter(destination="rabbit"),
    MessageFilter(destination=EMBEDDED),
    MessageFilter(destination=EMBEDDED, channel="orders", states=[State.SCHEDULED]),
    MessageFilter(dag_id="pay"),
    MessageFilter(dag_id="pay", task_id="remind"),
    MessageFilter(dag_id="pay", run_id="r1", task_id="remind"),
    MessageFilter(dag_id="pay", run_id="r1", task_id="remind", map_index=3, states=[State.SCHEDULED]),
    MessageFilter(run_id="r1"),
    MessageFilter(map_index=-1),
    MessageFilter(due_from_ms=NOW_MS + 3_000, due_to_ms=NOW_MS + 9_000),
    MessageFilter(id_contains="7"),
    MessageFilter(id_contains="7", channel="orders", dag_id="pay", destination="rabbit"),
]


@pytest.fixture
def stored(ledger: Ledger) -> list[MessageRecord]:
    """Messages of every kind, many of them due at the same moment."""
    choose = random.Random(13)
    for destination in (None, "rabbit"):
        batch = [
            Message(
                id=f"{destination}-{n}",
                channel=choose.choice(CHANNELS),
                payload=b"",
                deliver_at=from_ms(NOW_MS) + timedelta(seconds=choose.randint(0, 12)),
                origin=choose.choice(ORIGINS),
            )
            for n in range(60)
        ]
        rows.insert(ledger, batch, destination=destination)
    with ledger.engine.begin() as connection:
        for seq in range(1, 121):
            state = choose.choice(list(State))
            held = choose.randint(0, 1) if seq > 60 else 0
            connection.execute(
                update(scheduled_message)
                .where(scheduled_message.c.seq == seq)
                .values(state=state.value, held_by_broker=held)
            )
    return find_all(ledger, MessageFilter(), size=1000)


def find_all(
    ledger: Ledger,
    criteria: MessageFilter,
    *,
    size: int,
    is_visible: Callable[[MessageRecord], bool] = lambda _: True,
) -> list[MessageRecord]:
    """The messages of all pages; going back meets the same ones."""
    pages: list[Found] = []
    token = None
    with ledger.read() as connection:
        while True:
            page = search(connection, criteria, token=token, size=size, is_visible=is_visible)
            pages.append(page)
            assert len(page.records) == size or page.continuation is not None or page.next is None
            if page.next is None:
                break
            token = page.next
        forth = [record for page in pages for record in page.records]
        back = list(pages[-1].records)
        prev = pages[-1].prev
        while prev is not None:
            page = search(connection, criteria, token=prev, size=size, is_visible=is_visible)
            back = [*page.records, *back]
            prev = page.prev
    assert ids(back) == ids(forth)
    return forth


def ids(records: list[MessageRecord]) -> list[str]:
    return [record.message.id for record in records]


def meets(record: MessageRecord, criteria: MessageFilter) -> bool:
    message, origin = record.message, record.message.origin
    due_ms = round(message.deliver_at.timestamp() * 1000)
    wanted = {
        name: getattr(criteria, name)
        for name in ("dag_id", "run_id", "task_id", "map_index")
        if getattr(criteria, name) is not None
    }
    return (
        (not criteria.states or record.state in criteria.states)
        and criteria.channel in (None, message.channel)
        and (criteria.destination is None or criteria.destination == (record.destination or EMBEDDED))
        and (not wanted or (origin is not None and all(getattr(origin, name) == it for name, it in wanted.items())))
        and (criteria.due_from_ms is None or due_ms >= criteria.due_from_ms)
        and (criteria.due_to_ms is None or due_ms < criteria.due_to_ms)
        and (criteria.id_contains is None or criteria.id_contains in message.id)
    )


@pytest.mark.parametrize("scanned", [5, 2000])
@pytest.mark.parametrize("criteria", FILTERS, ids=str)
def test_every_message_that_meets_the_criteria_is_found_once_in_due_order(
    ledger: Ledger,
    stored: list[MessageRecord],
    criteria: MessageFilter,
    scanned: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B9, B10, B11, B46"""
    monkeypatch.setattr(searching, "SCANNED", scanned)
    expected = ids([record for record in stored if meets(record, criteria)])
    assert len(stored) == 120
    for size in (1, 7, 1000):
        assert ids(find_all(ledger, criteria, size=size)) == expected


def test_the_messages_are_in_due_order(stored: list[MessageRecord]) -> None:
    assert all(one.message.deliver_at <= other.message.deliver_at for one, other in pairwise(stored))


@pytest.mark.parametrize("scanned", [5, 2000])
def test_messages_that_the_reader_may_not_see_are_left_out_and_pages_stay_full(
    ledger: Ledger, stored: list[MessageRecord], scanned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "SCANNED", scanned)

    def is_visible(record: MessageRecord) -> bool:
        return record.message.origin is None or record.message.origin.dag_id == "ship"

    expected = ids([record for record in stored if is_visible(record)])
    assert ids(find_all(ledger, MessageFilter(), size=7, is_visible=is_visible)) == expected


def test_a_whole_id_finds_its_message_alone_however_many_there_are(
    ledger: Ledger, stored: list[MessageRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "SCANNED", 1)
    (wanted,) = (record for record in stored if record.message.id == "rabbit-5")

    assert ids(find_all(ledger, MessageFilter(id_contains="rabbit-5"), size=10)) == ["rabbit-5"]
    for state in State:
        found = find_all(ledger, MessageFilter(id_contains="rabbit-5", states=[state]), size=10)
        assert ids(found) == (["rabbit-5"] if state is wanted.state else [])


def test_a_page_that_found_nothing_yet_says_that_the_search_goes_on(
    ledger: Ledger, stored: list[MessageRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "SCANNED", 5)
    with ledger.read() as connection:
        page = search(connection, MessageFilter(id_contains="no such id"), size=10)
    assert (page.records, page.continuation) == ([], page.next)
    assert page.next is not None


@pytest.mark.parametrize("size", [0, 1001])
def test_a_page_has_1_to_1000_messages(ledger: Ledger, size: int) -> None:
    with ledger.read() as connection, pytest.raises(InvalidMessageError, match="use 1 to 1000"):
        search(connection, MessageFilter(), size=size)


def test_overdue_messages_are_counted_up_to_a_limit(
    ledger: Ledger, stored: list[MessageRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduled = [record for record in stored if record.state is State.SCHEDULED]
    overdue = [each for each in scheduled if each.message.deliver_at < from_ms(NOW_MS + 5_000)]
    monkeypatch.setattr(searching, "MOST_OVERDUE", 4)
    with ledger.read() as connection:
        assert count_overdue(connection, now_ms=NOW_MS) == (0, None)
        found, first_ms = count_overdue(connection, now_ms=NOW_MS + 5_000)
        monkeypatch.setattr(searching, "MOST_OVERDUE", 1000)
        for destination in (None, EMBEDDED, "rabbit"):
            expected = [each for each in overdue if destination in (None, each.destination or EMBEDDED)]
            assert count_overdue(connection, now_ms=NOW_MS + 5_000, destination=destination)[0] == len(expected)
    assert (found, from_ms(first_ms or 0)) == (5, overdue[0].message.deliver_at)
    assert len(overdue) > 5
