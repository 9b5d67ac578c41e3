"""The journal of another broker, followed in the ledger."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

from airflow_delay_provider.brokers.ledger import channels, delivery, listing, projection
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.tables import event, journal_position, message_count, scheduled_message
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.clock import ceil_ms, from_ms
from airflow_delay_provider.domain.exceptions import ConflictError, LifecycleError, UnknownMessageError
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change, JournalEntry, State
from airflow_delay_provider.domain.message import Message, Origin
from tests.unit.brokers.ledger import rows
from tests.unit.brokers.ledger.rows import NOW_MS, message, messages
from tests.unit.brokers.ledger.test_counts import assert_counts_are_true

RABBIT = "rabbit"


def entry_of(
    item: Message, change: Change, *, at_ms: int = NOW_MS, due_ms: int | None = None, carried: bool = True, **more: Any
) -> JournalEntry:
    """An entry about a message; positions are given when they are projected."""
    return JournalEntry(
        message_id=item.id,
        change=change,
        at=from_ms(at_ms),
        channel=item.channel,
        deliver_at=item.deliver_at if due_ms is None else from_ms(due_ms),
        position="",
        **{"message": item if carried else None} | more,
    )


def follow(ledger: Ledger, *entries: JournalEntry, destination: str = RABBIT) -> None:
    """Project entries as the next page."""
    after = rows.read(ledger, lambda c: projection.position_of(c, destination))
    here = f"{int(after or 0) + len(entries)}"
    assert ledger.transact(lambda c: projection.project(c, destination, entries, after=after, position=here))


def history(ledger: Ledger, item: Message) -> list[Change]:
    return [entry.change for entry in rows.read(ledger, lambda c: listing.get_history(c, item.id))]


def snapshot(ledger: Ledger) -> tuple[list[Any], ...]:
    """Everything but the numbers that the database gives."""
    message_columns = [column for column in scheduled_message.columns if column.name != "seq"]
    event_columns = [column for column in event.columns if column.name not in ("seq", "xid", "message_seq")]
    queries = (
        select(*message_columns).order_by(scheduled_message.c.id),
        select(*event_columns).order_by(event.c.message_id, event.c.seq),
        select(message_count).where(message_count.c.n != 0).order_by(*message_count.primary_key),
    )
    return tuple([tuple(row) for row in rows.read(ledger, lambda c, q=q: c.execute(q).all())] for q in queries)


def test_a_message_is_listed_with_all_that_the_journal_carries(ledger: Ledger):
    """A45, B14, B41"""
    item = message(
        NOW_MS + 1000,
        id="order-1",
        payload=b"\x00\xff",
        key="customer",
        headers={"a": "1"},
        content_type="text/plain",
        priority=9,
        origin=Origin(dag_id="bills", run_id="r", task_id="t", map_index=4),
    )
    follow(ledger, entry_of(item, Change.SCHEDULED))
    record = rows.get(ledger, item)
    assert (record.message, record.state, record.destination) == (item, State.SCHEDULED, RABBIT)
    assert record.held_by_broker
    assert record.scheduled_at == from_ms(NOW_MS)
    follow(ledger, entry_of(item, Change.DISPATCHED, at_ms=NOW_MS + 1007))
    record = rows.get(ledger, item)
    assert (record.message, record.state, record.lateness) == (item, State.DISPATCHED, timedelta(milliseconds=7))
    assert history(ledger, item) == [Change.SCHEDULED, Change.DISPATCHED]
    assert rows.count(ledger) == {State.DISPATCHED: 1}
    assert rows.read(ledger, lambda c: listing.count_by_state(c, destination=RABBIT))[State.DISPATCHED] == 1
    assert rows.read(ledger, lambda c: listing.count_by_channel(c, destination="other")) == {}


def test_a_journal_that_carries_no_messages_gives_rows_without_content(ledger: Ledger):
    item = message(payload=b"unseen", key="k")
    follow(ledger, entry_of(item, Change.SCHEDULED, carried=False))
    [record] = rows.page(ledger, destination=RABBIT).records
    assert (record.message.id, record.message.channel, record.message.deliver_at) == (
        item.id,
        "orders",
        item.deliver_at,
    )
    assert rows.get(ledger, item).message.payload == b""


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (Change.DISPATCHED, State.DISPATCHED),
        (Change.DEAD_LETTERED, State.DEAD),
        (Change.REQUEUED, State.SCHEDULED),
        (Change.CANCELLED, State.CANCELLED),
    ],
)
def test_a_journal_that_begins_later_adds_unknown_messages(ledger: Ledger, change: Change, state: State):
    item = message(handled_count=2)
    follow(ledger, entry_of(item, change, at_ms=NOW_MS + 1003))
    record = rows.get(ledger, item)
    assert (record.state, record.message) == (state, item)
    assert record.dispatched_at == (from_ms(NOW_MS + 1003) if state is State.DISPATCHED else None)
    assert rows.count(ledger) == {state: 1}
    assert history(ledger, item) == [change]


def test_a_whole_life_in_one_page_is_the_same_as_step_by_step(ledger: Ledger):
    """A23, A25, A27"""
    first, second = messages(1000, 1000)
    lives = []
    for item in (first, second):
        again = item.requeued(from_ms(NOW_MS + 5000))
        replayed = message(NOW_MS + 9000, id=item.id)
        lives.append(
            [
                entry_of(item, Change.SCHEDULED),
                entry_of(item, Change.RESCHEDULED, at_ms=NOW_MS + 1, due_ms=NOW_MS + 2000),
                entry_of(item, Change.EXPEDITED, at_ms=NOW_MS + 2, due_ms=NOW_MS + 2),
                entry_of(item, Change.DISPATCHED, at_ms=NOW_MS + 3, due_ms=NOW_MS + 2),
                entry_of(again, Change.REQUEUED, at_ms=NOW_MS + 1100, reason="later"),
                entry_of(again, Change.DISPATCHED, at_ms=NOW_MS + 5001),
                entry_of(again, Change.DEAD_LETTERED, at_ms=NOW_MS + 5002, reason="bad\0"),
                entry_of(replayed, Change.REQUEUED, at_ms=NOW_MS + 6000),
            ]
        )
    follow(ledger, *lives[0])
    for entry in lives[1]:
        follow(ledger, entry)
    for item, life in zip((first, second), lives, strict=True):
        record = rows.get(ledger, item)
        assert (record.state, record.message.handled_count, record.dispatched_at) == (State.SCHEDULED, 0, None)
        assert record.message.deliver_at == from_ms(NOW_MS + 9000)
        assert history(ledger, item) == [entry.change for entry in life]
        reasons = [entry.reason for entry in rows.read(ledger, lambda c, i=item: listing.get_history(c, i.id))]
        assert reasons == [None, None, None, None, "later", None, "bad?", None]
    assert rows.count(ledger) == {State.SCHEDULED: 2}


def test_a_replacement_brings_its_content(ledger: Ledger):
    item, new = message(id="m", payload=b"old"), message(NOW_MS + 9, id="m", payload=b"new", headers={"h": "v"})
    follow(ledger, entry_of(item, Change.SCHEDULED))
    follow(ledger, entry_of(new, Change.RESCHEDULED))
    record = rows.get(ledger, item)
    assert (record.message, record.generation) == (new, 1)


# -- once --------------------------------------------------------------------------------------------------------------


def test_a_journal_page_that_several_dispatchers_read_is_applied_once(ledger: Ledger):
    """B32: and a page that is read again changes nothing."""
    item = message()
    follow(ledger, entry_of(item, Change.SCHEDULED))
    page = [entry_of(item, Change.DISPATCHED), entry_of(message(), Change.SCHEDULED)]
    results, states = [], []
    for _ in range(3):
        results.append(ledger.transact(lambda c: projection.project(c, RABBIT, page, after="1", position="3")))
        states.append(snapshot(ledger))
    assert [each is not None for each in results] == [True, False, False]
    assert states[0] == states[1] == states[2]
    first = ledger.transact(lambda c: projection.project(c, RABBIT, page, after=FROM_THE_START, position="9"))
    assert (first, rows.read(ledger, lambda c: projection.position_of(c, RABBIT))) == (None, "3")


def test_a_page_that_fails_leaves_no_trace(ledger: Ledger):
    def fail(connection: Any) -> None:
        entries = [entry_of(message(), Change.SCHEDULED)]
        projection.project(connection, RABBIT, entries, after=FROM_THE_START, position="1")
        raise LifecycleError("x", "is refused")

    with pytest.raises(LifecycleError):
        ledger.transact(fail)
    assert snapshot(ledger) == ([], [], [])
    assert rows.read(ledger, lambda c: projection.position_of(c, RABBIT)) == FROM_THE_START


def test_each_connection_has_a_position_of_its_own(ledger: Ledger):
    follow(ledger, entry_of(message(), Change.SCHEDULED), destination="one")
    follow(ledger, entry_of(message(), Change.SCHEDULED), entry_of(message(), Change.SCHEDULED), destination="two")
    positions = [rows.read(ledger, lambda c, d=d: projection.position_of(c, d)) for d in ("one", "two", "three")]
    assert positions == ["1", "2", FROM_THE_START]


@pytest.mark.parametrize("carried", [True, False])
def test_a_message_that_a_broker_sends_twice_keeps_its_first_dispatch(ledger: Ledger, carried: bool):
    """B33"""
    item = message(NOW_MS)
    for at_ms in (NOW_MS + 5, NOW_MS + 500):
        follow(ledger, entry_of(item, Change.SCHEDULED, carried=carried))
        follow(ledger, entry_of(item, Change.DISPATCHED, at_ms=at_ms, carried=carried))
    assert rows.get(ledger, item).lateness == timedelta(milliseconds=5)
    assert history(ledger, item) == [Change.SCHEDULED, Change.DISPATCHED]
    assert rows.count(ledger) == {State.DISPATCHED: 1}


@pytest.mark.parametrize("carried", [True, False])
def test_the_second_copy_of_an_earlier_delivery_does_not_end_the_wait_of_the_next(ledger: Ledger, carried: bool):
    item = message(NOW_MS)
    again = item.requeued(from_ms(NOW_MS + 9000))
    entries = [
        entry_of(item, Change.SCHEDULED, carried=carried),
        entry_of(item, Change.DISPATCHED, at_ms=NOW_MS + 1, carried=carried),
        entry_of(again, Change.REQUEUED, at_ms=NOW_MS + 2, carried=carried),
    ]
    follow(ledger, *entries, entry_of(item, Change.DISPATCHED, at_ms=NOW_MS + 3, carried=carried))
    assert rows.state(ledger, item) is State.SCHEDULED
    follow(ledger, entry_of(again, Change.DISPATCHED, at_ms=NOW_MS + 9001, carried=carried))
    record = rows.get(ledger, item)
    assert (record.state, record.message.handled_count) == (State.DISPATCHED, 1)
    assert record.lateness == timedelta(milliseconds=1)


def test_copies_of_a_message_are_distinguished_by_their_handled_counts(ledger: Ledger):
    item = message(NOW_MS)
    again = item.requeued(from_ms(NOW_MS + 100))
    follow(
        ledger,
        entry_of(item, Change.SCHEDULED),
        entry_of(item, Change.DISPATCHED, at_ms=NOW_MS + 1),
        entry_of(again, Change.REQUEUED, at_ms=NOW_MS + 2),
        entry_of(item, Change.DISPATCHED, at_ms=NOW_MS + 101),
    )
    assert rows.state(ledger, item) is State.SCHEDULED
    follow(ledger, entry_of(again, Change.DISPATCHED, at_ms=NOW_MS + 102))
    follow(ledger, entry_of(again, Change.REQUEUED, at_ms=NOW_MS + 103))
    record = rows.get(ledger, item)
    assert (record.state, record.generation, record.lateness) == (State.DISPATCHED, 1, timedelta(milliseconds=2))


def random_life(chance: random.Random, *, carried: bool) -> list[JournalEntry]:
    """The entries of one message: any path through its states, some of it twice."""
    item = message(NOW_MS + chance.randint(0, 50), channel=chance.choice(["a", "b"]))
    now, state, life = NOW_MS + chance.randint(0, 30), State.SCHEDULED, list[JournalEntry]()

    def add(what: Message, change: Change, at_ms: int) -> None:
        life.append(entry_of(what, change, at_ms=at_ms, carried=carried))

    if chance.random() < 0.8:
        add(item, Change.SCHEDULED, now)
    for _ in range(chance.randint(1, 8)):
        now += chance.randint(1, 20)
        match state:
            case State.SCHEDULED:
                change = chance.choice(
                    [Change.DISPATCHED] * 4 + [Change.RESCHEDULED, Change.EXPEDITED, Change.CANCELLED]
                )
                if change is Change.DISPATCHED:
                    now, state = max(now, ceil_ms(item.deliver_at)), State.DISPATCHED
                elif change is Change.CANCELLED:
                    state = State.CANCELLED
                else:
                    due = now if change is Change.EXPEDITED else now + chance.randint(1, 99)
                    item = message(due, id=item.id, channel=item.channel, handled_count=item.handled_count)
                add(item, change, now)
                if change is Change.DISPATCHED and chance.random() < 0.4:
                    add(item, change, now + 1)
            case State.DISPATCHED if chance.random() < 0.2:
                add(item, Change.DEAD_LETTERED, now)
                state = State.DEAD
            case State.DISPATCHED | State.DEAD:
                count = 0 if state is State.DEAD else item.handled_count + 1
                due = now + chance.randint(5, 99)
                again = message(due, id=item.id, channel=item.channel, handled_count=count)
                add(again, Change.REQUEUED, now)
                if state is State.DISPATCHED and chance.random() < 0.3:
                    # The other copy comes while the message waits again.
                    add(item, Change.DISPATCHED, now + 1)
                    now += 1
                item, state = again, State.SCHEDULED
        if chance.random() < 0.2:
            add(item, Change.SCHEDULED, now)
    return life


def random_journal(chance: random.Random, *, carried: bool) -> list[JournalEntry]:
    """The interleaved histories of many messages."""
    lives = [random_life(chance, carried=carried) for _ in range(12)]
    entries = []
    while lives := [life for life in lives if life]:
        entries.append(chance.choice(lives).pop(0))
    return entries


def project_from(ledger: Ledger, entries: Sequence[JournalEntry], start: int, end: int) -> None:
    """Read on from where the position says, wherever that is."""
    after, here = str(start) if start else FROM_THE_START, str(end)
    page = entries[start:end]
    assert ledger.transact(lambda c: projection.project(c, RABBIT, page, after=after, position=here))


def go_back_to(ledger: Ledger, start: int) -> None:
    """As if the position had been lost."""

    def reset(connection: Any) -> None:
        if start:
            connection.execute(update(journal_position).values(position=str(start)))
        else:
            connection.execute(journal_position.delete())

    ledger.transact(reset)


def replay(ledger: Ledger, entries: Sequence[JournalEntry], chance: random.Random) -> None:
    """Read the whole journal in pages of any size, going back and reading again at any time."""
    here = 0
    while here < len(entries):
        end = min(len(entries), here + chance.choice([1, 2, 3, 7, 30]))
        project_from(ledger, entries, here, end)
        here = end
        if chance.random() < 0.3:
            here = chance.randint(0, here)
            go_back_to(ledger, here)


def check_that_reading_again_changes_nothing(once: Ledger, often: Ledger, seed: int, *, carried: bool) -> None:
    chance = random.Random(seed)
    entries = random_journal(chance, carried=carried)
    project_from(once, entries, 0, len(entries))
    expected = snapshot(once)
    assert len(expected[0]) == 12
    assert_counts_are_true(once)
    replay(often, entries, chance)
    assert snapshot(often) == expected
    assert_counts_are_true(often)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("carried", [True, False])
def test_reading_in_any_pages_and_again_gives_the_same_rows_history_and_counts(tmp_path: Any, seed: int, carried: bool):
    """B14, B66"""
    ledgers = [Ledger(f"sqlite:///{tmp_path / name}.db") for name in ("once", "often")]
    check_that_reading_again_changes_nothing(*ledgers, seed, carried=carried)
    for ledger in ledgers:
        ledger.close()


@pytest.mark.parametrize("carried", [True, False])
def test_both_databases_follow_a_journal_alike(tmp_path: Any, postgres_url: str, carried: bool):
    """B14, B66"""
    ledgers = [Ledger(f"sqlite:///{tmp_path / 'once'}.db"), Ledger(postgres_url)]
    check_that_reading_again_changes_nothing(*ledgers, 11, carried=carried)
    for ledger in ledgers:
        ledger.close()


# -- beside messages that the ledger holds -----------------------------------------------------------------------------


@pytest.mark.parametrize("destination", [RABBIT, "kafka", None])
def test_a_message_whose_wait_the_ledger_keeps_is_left_alone(ledger: Ledger, destination: str | None):
    kept = message(NOW_MS)
    rows.insert(ledger, [kept], destination=destination)
    before = snapshot(ledger)
    follow(ledger, entry_of(kept, Change.SCHEDULED), entry_of(kept, Change.DISPATCHED))
    assert snapshot(ledger) == before
    assert not rows.get(ledger, kept).held_by_broker


def test_a_dispatcher_takes_nothing_that_a_broker_holds(ledger: Ledger):
    """B33: it would arrive twice."""
    held, ours = message(NOW_MS - 5, key="k"), message(NOW_MS - 1, key="k")
    follow(ledger, entry_of(held, Change.SCHEDULED))
    assert rows.read(ledger, lambda c: delivery.next_due_ms(c, destination=RABBIT)) is None
    assert rows.read(ledger, listing.waiting_destinations) == []
    assert rows.read(ledger, delivery.next_due_ms) is None
    assert rows.deliver(ledger) == 0
    rows.insert(ledger, [ours], destination=RABBIT)
    assert rows.read(ledger, listing.waiting_destinations) == [RABBIT]
    assert rows.read(ledger, lambda c: delivery.next_due_ms(c, destination=RABBIT)) == NOW_MS - 1
    claims = ledger.transact(
        lambda c: delivery.claim_due(c, destination=RABBIT, owner="me", now_ms=NOW_MS, until_ms=NOW_MS + 9, limit=9)
    )
    assert [claim.message for claim in claims] == [ours]
    assert rows.state(ledger, held) is State.SCHEDULED


@pytest.mark.parametrize("change", [Change.CANCELLED, Change.RESCHEDULED, Change.EXPEDITED])
def test_control_of_a_message_that_a_broker_holds_is_refused_with_the_remedy(ledger: Ledger, change: Change):
    """A27"""
    held = message()
    follow(ledger, entry_of(held, Change.SCHEDULED))
    with pytest.raises(LifecycleError, match=r"held by the broker of connection 'rabbit'.*hold=\"ledger\""):
        rows.change(ledger, change, held, deliver_at_ms=NOW_MS)
    with pytest.raises(ConflictError, match="held by the broker of connection 'rabbit'"):
        rows.insert(ledger, [held], destination=RABBIT, on_conflict=OnConflict.REPLACE)
    follow(ledger, entry_of(held, Change.DISPATCHED))
    with pytest.raises(LifecycleError, match="is DISPATCHED and cannot be"):
        rows.change(ledger, change, held, deliver_at_ms=NOW_MS)


@pytest.mark.parametrize("dispatch_is_known", [True, False])
def test_a_message_that_is_requeued_into_the_ledger_is_held_there_from_then_on(ledger: Ledger, dispatch_is_known: bool):
    """A23: the journal may still be behind when a consumer puts the message back; it must not be lost."""
    item = message(NOW_MS - 1)
    dispatched = entry_of(item, Change.DISPATCHED)
    follow(ledger, entry_of(item, Change.SCHEDULED), *([dispatched] if dispatch_is_known else []))
    put_back = {"destination": RABBIT, "deliver_at_ms": NOW_MS, "now_ms": NOW_MS, "reason": None}
    assert ledger.transact(lambda c: channels.put_back_from(c, item, **put_back)) is not None
    follow(ledger, dispatched)
    record = rows.get(ledger, item)
    assert (record.state, record.held_by_broker, record.message.handled_count) == (State.SCHEDULED, False, 1)
    assert rows.read(ledger, lambda c: delivery.next_due_ms(c, destination=RABBIT)) == NOW_MS
    assert_counts_are_true(ledger)


def test_ended_messages_are_pruned_like_any_other_message(ledger: Ledger):
    """B66"""
    ended, waits = messages(-1, -1)
    follow(ledger, entry_of(ended, Change.DISPATCHED), entry_of(waits, Change.SCHEDULED))
    rows.fold_all(ledger)
    assert rows.prune(ledger, before_ms=NOW_MS + 1, limit=10) == 1
    with pytest.raises(UnknownMessageError):
        rows.get(ledger, ended)
    assert rows.state(ledger, waits) is State.SCHEDULED
    assert_counts_are_true(ledger)


def test_listings_can_be_limited_to_a_connection(ledger: Ledger):
    """B9"""
    ours, held, other = messages(5, 3, 1)
    rows.insert(ledger, [ours], destination=RABBIT)
    follow(ledger, entry_of(held, Change.SCHEDULED))
    rows.insert(ledger, [other])
    assert rows.ids(rows.page(ledger, destination=RABBIT).records) == [held.id, ours.id]
    assert rows.ids(rows.page(ledger).records) == [other.id, held.id, ours.id]
    next_at = rows.read(ledger, lambda c: listing.next_scheduled_at(c, destination=RABBIT))
    assert next_at == held.deliver_at
    assert rows.read(ledger, lambda c: listing.get(c, held.id, destination=RABBIT)).message == held
    with pytest.raises(UnknownMessageError):
        rows.read(ledger, lambda c: listing.get(c, other.id, destination=RABBIT))


# -- entries without checks --------------------------------------------------------------------------------------------


def test_an_entry_that_names_no_possible_message_is_passed_over(ledger: Ledger, caplog: pytest.LogCaptureFixture):
    good = message()
    nonsense = JournalEntry(
        message_id="x",
        change=Change.SCHEDULED,
        at=from_ms(0),
        channel="no channel!",
        deliver_at=from_ms(0),
        position="",
    )
    with caplog.at_level(logging.WARNING):
        follow(ledger, nonsense, entry_of(good, Change.SCHEDULED))
    assert rows.ids(rows.page(ledger).records) == [good.id]
    assert "cannot be listed: channel" in caplog.text


def test_a_message_whose_values_exceed_the_columns_blocks_no_other(ledger: Ledger):
    """It came into the broker without the checks of this ledger."""
    origin = Origin(dag_id="d" * 999, run_id="r\0", task_id="t")
    strange = message(origin=origin, priority=2**40, handled_count=2**40)
    follow(ledger, entry_of(strange, Change.SCHEDULED), entry_of(message(), Change.SCHEDULED))
    stored = rows.get(ledger, strange).message
    assert stored.origin == Origin(dag_id="d" * 250, run_id="r?", task_id="t")
    assert rows.count(ledger) == {State.SCHEDULED: 2}


def test_the_ledgers_own_journal_can_be_read_from_its_start(ledger: Ledger):
    item = message()
    follow(ledger, entry_of(item, Change.SCHEDULED))
    [entry] = rows.read_journal(ledger, 1)
    assert (entry.message_id, entry.change, entry.deliver_at) == (item.id, Change.SCHEDULED, item.deliver_at)
