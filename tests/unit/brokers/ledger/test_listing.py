from __future__ import annotations

import base64
from collections.abc import Iterable
from datetime import timedelta
from itertools import product

import pytest

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.listing import MAX_PAGE_SIZE, Page
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.exceptions import InvalidMessageError, UnknownMessageError
from airflow_delay_provider.domain.lifecycle import Change, State
from airflow_delay_provider.domain.message import Message
from tests.unit.brokers.ledger import rows
from tests.unit.brokers.ledger.rows import NOW_MS, messages


def walk(ledger: Ledger, start: Page, direction: str, **options: object) -> list[list[str]]:
    """The ids of all pages from ``start`` on."""
    pages, page = [rows.ids(start.records)], start
    while token := getattr(page, direction):
        page = rows.page(ledger, token=token, **options)
        pages.append(rows.ids(page.records))
    return pages


def joined(pages: Iterable[list[str]]) -> list[str]:
    return [message_id for page in pages for message_id in page]


def last_page(ledger: Ledger, **options: object) -> Page:
    page = rows.page(ledger, **options)
    while page.next:
        page = rows.page(ledger, token=page.next, **options)
    return page


def test_pages_go_through_all_messages_in_due_order_both_ways(ledger: Ledger):
    """B9, B10, B46, A45, C13"""
    batch = messages(30, 10, 20, 10, 40, 10, 50)
    rows.insert(ledger, batch)
    due_order = [batch[n].id for n in (1, 3, 5, 2, 0, 4, 6)]
    first = rows.page(ledger, size=3)
    assert first.prev is None
    assert walk(ledger, first, "next", size=3) == [due_order[:3], due_order[3:6], due_order[6:]]
    last = last_page(ledger, size=3)
    assert last.next is None
    assert walk(ledger, last, "prev", size=3) == [due_order[6:], due_order[3:6], due_order[:3]]


def test_going_forth_and_back_meets_the_same_messages_at_any_page_size(ledger: Ledger):
    """B10, B46"""
    batch = messages(*range(4))
    rows.insert(ledger, batch)
    for size in (1, 2, 3, 4, 5, 100):
        forth = walk(ledger, rows.page(ledger, size=size), "next", size=size)
        back = walk(ledger, last_page(ledger, size=size), "prev", size=size)
        assert joined(forth) == joined(reversed(back)) == [message.id for message in batch]


def test_a_full_last_page_has_no_next(ledger: Ledger):
    """B10"""
    rows.insert(ledger, messages(1, 2))
    assert rows.page(ledger, size=2).next is None


def test_an_empty_ledger_has_one_empty_page(ledger: Ledger):
    """B10"""
    assert rows.page(ledger) == Page(records=[], next=None, prev=None)


@pytest.fixture
def mixed(ledger: Ledger) -> dict[tuple[str, State], list[Message]]:
    """Two channels with messages in three states, due in turn."""
    found: dict[tuple[str, State], list[Message]] = {}
    for offset, channel in enumerate(("orders", "refunds")):
        batch = messages(*(10 * n + offset for n in range(6)), channel=channel)
        rows.insert(ledger, batch)
        rows.change(ledger, Change.CANCELLED, *batch[2:4])
        found |= {(channel, State.DISPATCHED): batch[:2], (channel, State.CANCELLED): batch[2:4]}
        found[channel, State.SCHEDULED] = batch[4:]
    rows.deliver(ledger, now_ms=NOW_MS + 12)
    return found


CHANNELS = [None, "orders", "refunds", "no-such"]
STATES = [(), (State.SCHEDULED,), (State.DISPATCHED, State.CANCELLED), (State.DEAD,), tuple(State)]


def test_pages_are_filtered_by_channel_and_states(ledger: Ledger, mixed: dict[tuple[str, State], list[Message]]):
    """B9, B11, B46, B59"""
    for channel, states in product(CHANNELS, STATES):
        wanted = [
            message
            for (where, state), batch in mixed.items()
            for message in batch
            if channel in (None, where) and (not states or state in states)
        ]
        expected = [message.id for message in sorted(wanted, key=lambda message: message.deliver_at)]
        options = {"channel": channel, "states": states, "size": 2}
        pages = walk(ledger, rows.page(ledger, **options), "next", **options)
        assert joined(pages) == expected
        assert all(len(page) <= 2 for page in pages)


def test_pages_are_stable_while_messages_come_and_change(ledger: Ledger):
    """B10, B46: what was not touched is seen once, whatever happens beside it."""
    batch = messages(*range(0, 100, 10))
    rows.insert(ledger, batch)
    first = rows.page(ledger, size=4)
    earlier, later = messages(5, 55)
    rows.insert(ledger, [earlier, later])
    rows.change(ledger, Change.CANCELLED, batch[3], batch[5])
    rows.change(ledger, Change.EXPEDITED, batch[0], deliver_at_ms=NOW_MS - 1)
    rest = joined(walk(ledger, rows.page(ledger, token=first.next, size=4), "next", size=4))
    assert rows.ids(first.records) + rest == [message.id for message in (*batch[:6], later, *batch[6:])]


def test_a_page_whose_place_vanished_goes_on_behind_it(ledger: Ledger):
    """B10"""
    batch = messages(0, 1, 2, 3)
    rows.insert(ledger, batch)
    options = {"states": (State.SCHEDULED,), "size": 2}
    first = rows.page(ledger, **options)
    rows.change(ledger, Change.CANCELLED, *batch[:2])
    assert rows.ids(rows.page(ledger, token=first.next, **options).records) == [batch[2].id, batch[3].id]


def test_lists_leave_the_payload_out_and_one_message_brings_it(ledger: Ledger):
    """B12"""
    [stored] = messages(1, payload=b"x" * 1000, headers={"a": "b"})
    rows.insert(ledger, [stored])
    [listed] = rows.page(ledger).records
    assert listed.message.payload == b""
    assert listed.message.headers == {"a": "b"}
    assert rows.get(ledger, stored).message.payload == stored.payload


def test_a_page_size_out_of_bounds_is_refused(ledger: Ledger):
    for size in (0, -1, MAX_PAGE_SIZE + 1):
        with pytest.raises(InvalidMessageError, match=f"limit: .*; use 1 to {MAX_PAGE_SIZE}"):
            rows.page(ledger, size=size)


def encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


NO_TOKENS = ["", "x", "ü", "===="]
NO_PLACES = ["", ">:1", "?:1:2", ">:a:b", ">:1:2:3", f">:{10**30}:1", f"<:1:{10**30}"]


def test_an_invalid_page_token_is_refused(ledger: Ledger):
    """B3"""
    for token in (*NO_TOKENS, *map(encoded, NO_PLACES)):
        with pytest.raises(InvalidMessageError, match=r"page: .* is not a page token; use one that a listing printed"):
            rows.page(ledger, token=token)


def test_the_next_time_is_that_of_the_earliest_waiting_message(ledger: Ledger):
    """B15, B20, B46, B49"""

    def next_at(channel: str | None = None) -> timedelta | None:
        found = rows.read(ledger, lambda c: listing.next_scheduled_at(c, channel=channel))
        return None if found is None else found - from_ms(NOW_MS)

    assert next_at() is None
    soon, late = messages(5, 50)
    rows.insert(ledger, [soon, late])
    rows.insert(ledger, messages(7, channel="refunds"), destination="rabbit")
    assert next_at() == next_at("orders") == timedelta(milliseconds=5)
    assert next_at("refunds") == timedelta(milliseconds=7)
    assert next_at("no-such") is None
    rows.deliver(ledger, now_ms=NOW_MS + 5)
    assert next_at("orders") == timedelta(milliseconds=50)
    rows.change(ledger, Change.CANCELLED, late)
    assert next_at("orders") is None


def test_the_history_of_an_unknown_message_is_not_found(ledger: Ledger):
    """B13"""
    with pytest.raises(UnknownMessageError):
        rows.read(ledger, lambda c: listing.get_history(c, "nothing"))
