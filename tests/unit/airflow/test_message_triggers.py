"""The triggers, and the one thread that any number of them share."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.serde import deserialize, serialize

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.heartbeats import GONE_AFTER
from airflow_delay_provider.brokers.ledger.tables import event
from airflow_delay_provider.domain.arguments import compose_message
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.domain.lifecycle import JournalEntry, State
from airflow_delay_provider.hooks.delay import DelayHook, ledger_id_of
from airflow_delay_provider.triggers import journal_tail, message
from airflow_delay_provider.triggers.broker_thread import BrokerThread
from airflow_delay_provider.triggers.channel_watch import ChannelWatch
from airflow_delay_provider.triggers.journal_tail import JournalTail
from airflow_delay_provider.triggers.message import ChannelTrigger, MessageDispatchedTrigger
from tests.heartbeats import let_pass, write_heartbeat
from tests.waiting import until

HOUR = timedelta(hours=1)
Schedule = Callable[..., list[str]]


@pytest.fixture
def schedule(broker: EmbeddedBroker) -> Schedule:
    def store(*ids: str, channel: str = "invoices", payload: Any = "x", after: timedelta = HOUR / 2) -> list[str]:
        now = broker.clock.now()
        broker.schedule(
            [compose_message(channel, payload, message_id=each, deliver_after=after, now=now) for each in ids]
        )
        return list(ids)

    return store


@pytest.fixture(autouse=True)
async def _no_thread_is_left() -> AsyncIterator[None]:
    yield
    await until(lambda: not tail_threads())
    assert not BrokerThread._running


def tail_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith((JournalTail.__name__, ChannelWatch.__name__))]


def start(*triggers: Any) -> list[asyncio.Task[Any]]:
    async def first_event(trigger: Any) -> Any:
        return (await anext(trigger.run())).payload

    return [asyncio.create_task(first_event(trigger)) for trigger in triggers]


def tails() -> list[JournalTail]:
    return [thread for thread in BrokerThread._running.values() if isinstance(thread, JournalTail)]


async def finish(waiting: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(waiting, timeout=20)


async def test_a_waiter_learns_of_a_message_that_is_dispatched_while_it_waits(
    schedule: Schedule, dispatch: Callable[..., int]
) -> None:
    (waiting,) = start(MessageDispatchedTrigger(message_ids=schedule("a", "b")))
    await until(lambda: tails() and tails()[0]._position)
    dispatch(HOUR)

    event = await finish(waiting)

    assert event["counts"] == {"dispatched": 2}
    assert event["outcomes"]["a"]["change"] == "dispatched"
    lateness = timedelta(milliseconds=event["outcomes"]["a"]["lateness_ms"])
    assert HOUR / 2 <= lateness < HOUR / 2 + timedelta(minutes=1)


async def test_a_waiter_that_comes_late_learns_what_happened_before(
    schedule: Schedule, dispatch: Callable[..., int], broker: EmbeddedBroker
) -> None:
    ids = schedule("sent", "recalled")
    broker.cancel(["recalled"])
    dispatch(HOUR)

    (waiting,) = start(MessageDispatchedTrigger(message_ids=ids))

    assert (await finish(waiting))["counts"] == {"dispatched": 1, "cancelled": 1}


async def test_a_thousand_waiting_triggers_share_one_thread(schedule: Schedule, dispatch: Callable[..., int]) -> None:
    """A2, A13: no thread and no connection per waiting task."""
    ids = schedule(*(f"message-{number}" for number in range(1000)))
    waiting = start(*(MessageDispatchedTrigger(message_ids=[each]) for each in ids))
    await until(lambda: tails() and tails()[0].users == 1000)

    assert len(tail_threads()) == 1
    dispatch(HOUR)
    events = await finish(asyncio.gather(*waiting))

    assert sum(event["counts"]["dispatched"] for event in events) == 1000


async def test_all_waiters_that_come_together_look_back_once(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A triggerer that starts again has all its triggers at once, each with a position of its own."""
    looked, may_look = list[int](), threading.Event()
    find = EmbeddedBroker.find_outcomes_of_each

    def find_when_all_are_there(self: EmbeddedBroker, since: Mapping[str, str]) -> Mapping[str, JournalEntry]:
        assert may_look.wait(60)
        looked.append(len(since))
        return find(self, since)

    monkeypatch.setattr(EmbeddedBroker, "find_outcomes_of_each", find_when_all_are_there)
    ids, positions = list[str](), list[str]()
    for _ in range(30):
        positions.append(broker.journal_end())
        [receipt] = broker.schedule([compose_message("invoices", "x", deliver_after=0, now=broker.clock.now())])
        ids.append(receipt.message_id)
    awaited = [*zip(ids, positions, strict=True), (ids[0], positions[5])]
    waiting = start(*(MessageDispatchedTrigger(message_ids=[each], since=since) for each, since in awaited))
    await until(lambda: tails() and tails()[0].users == len(awaited))
    may_look.set()
    events = await finish(asyncio.gather(*waiting))
    assert sum(event["counts"]["dispatched"] for event in events) == len(awaited)
    # The first may begin before the others are there; the last awaits a message that another waiter awaits, too.
    assert len(looked) <= 3


async def test_waiters_of_the_same_message_are_all_woken(schedule: Schedule, dispatch: Callable[..., int]) -> None:
    schedule("a")
    waiting = start(*(MessageDispatchedTrigger(message_ids=["a"]) for _ in range(3)))
    await until(lambda: tails() and tails()[0].users == 3)
    dispatch(HOUR)

    assert len(await finish(asyncio.gather(*waiting))) == 3


async def test_a_waiter_that_leaves_disturbs_no_other(schedule: Schedule, dispatch: Callable[..., int]) -> None:
    schedule("a")
    leaver, stayer = start(MessageDispatchedTrigger(message_ids=["a"]), MessageDispatchedTrigger(message_ids=["a"]))
    await until(lambda: tails() and tails()[0].users == 2)
    leaver.cancel()
    await until(lambda: tails()[0].users == 1)
    dispatch(HOUR)

    assert (await finish(stayer))["counts"] == {"dispatched": 1}


async def test_connections_have_a_thread_each(
    schedule: Schedule, dispatch: Callable[..., int], broker: EmbeddedBroker, connect: Callable[..., None]
) -> None:
    connect(str(broker.ledger.url), "delay_other")
    schedule("a")
    waiting = start(
        MessageDispatchedTrigger(message_ids=["a"]),
        MessageDispatchedTrigger(message_ids=["a"], delay_conn_id="delay_other"),
    )
    await until(lambda: len(tails()) == 2)
    dispatch(HOUR)

    assert len(await finish(asyncio.gather(*waiting))) == 2


async def test_waiters_survive_an_outage(
    schedule: Schedule,
    dispatch: Callable[..., int],
    broker: EmbeddedBroker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B34: the journal fails in the middle of the wait and comes back."""
    quick = Backoff(
        initial=timedelta(milliseconds=20), cap=timedelta(milliseconds=50), floor=timedelta(milliseconds=10)
    )
    monkeypatch.setattr(BrokerThread, "outage", quick)
    schedule("a")
    (waiting,) = start(MessageDispatchedTrigger(message_ids=["a"]))
    await until(lambda: tails() and tails()[0]._position)
    (tail,) = tails()

    with caplog.at_level(logging.WARNING):
        with unreadable_journal(broker):
            await until(lambda: tail._failures >= 3)
        dispatch(HOUR)
        outcome = await finish(waiting)
        await until(lambda: "reachable again" in caplog.text)

    assert outcome["counts"] == {"dispatched": 1}
    assert caplog.text.count("tasks keep waiting") == 1


@contextmanager
def unreadable_journal(broker: EmbeddedBroker) -> Iterator[None]:
    def rename(old: str, new: str) -> None:
        broker.ledger.transact(lambda connection: connection.exec_driver_sql(f"ALTER TABLE {old} RENAME TO {new}"))

    rename(event.name, "gone")
    yield
    rename("gone", event.name)


async def test_an_outage_collects_no_searches(
    schedule: Schedule, dispatch: Callable[..., int], broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds all awaited ids, and there may be thousands."""
    quick = Backoff(initial=timedelta(milliseconds=20), cap=timedelta(milliseconds=20), floor=timedelta(0))
    monkeypatch.setattr(BrokerThread, "outage", quick)
    monkeypatch.setattr(journal_tail, "RECONCILE_SECONDS", 0.01)
    schedule("a")
    (waiting,) = start(MessageDispatchedTrigger(message_ids=["a"]))
    await until(lambda: tails() and tails()[0]._reconciled)
    (tail,) = tails()
    with unreadable_journal(broker):
        failures = tail._failures
        await until(lambda: tail._failures >= failures + 5)
        assert len(tail._searches) + len(tail._begun) <= 1
        assert tail._is_reconciling
    await until(lambda: tail._failures == 0 and not tail._begun)
    dispatch(HOUR)

    assert (await finish(waiting))["counts"] == {"dispatched": 1}


async def test_outcomes_are_kept_without_their_messages(
    schedule: Schedule, dispatch: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task may wait for thousands of messages, and the journals of RabbitMQ and Kafka carry them."""
    read = EmbeddedBroker.read_journal

    def read_with_messages(self: EmbeddedBroker, *, after: str, limit: int = 1000) -> list[JournalEntry]:
        large = compose_message("invoices", b"x" * 100_000, deliver_after=0, now=self.clock.now())
        return [replace(entry, message=large) for entry in read(self, after=after, limit=limit)]

    monkeypatch.setattr(EmbeddedBroker, "read_journal", read_with_messages)
    schedule("a", "b")
    with JournalTail.shared("delay_default") as tail:
        waiting = asyncio.create_task(tail.outcomes(["a", "b"], since=""))
        await until(lambda: tail._position and not (tail._searches or tail._begun))
        dispatch(HOUR)
        outcomes = await finish(waiting)

    assert {each: entry.message for each, entry in outcomes.items()} == {"a": None, "b": None}


async def test_a_waiter_that_comes_during_an_outage_waits_on(
    broker: EmbeddedBroker, schedule: Schedule, dispatch: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = Backoff(initial=timedelta(milliseconds=20), cap=timedelta(milliseconds=20), floor=timedelta(0))
    monkeypatch.setattr(BrokerThread, "outage", quick)
    schedule("a")
    dispatch(HOUR)
    with unreachable(Path(str(broker.ledger.url.database))):
        (waiting,) = start(MessageDispatchedTrigger(message_ids=["a"]))
        await until(lambda: tails() and tails()[0]._failures >= 3)

    assert (await finish(waiting))["counts"] == {"dispatched": 1}


@contextmanager
def unreachable(file: Path) -> Iterator[None]:
    """Replace the database file by a link to itself, which cannot be opened.

    The file comes back last and in one step, so that no process finds a path where it could create a new ledger.
    """
    aside = file.with_name("aside")
    aside.mkdir()
    parts = sorted(file.parent.glob(f"{file.name}*"), reverse=True)
    for part in parts:
        part.rename(aside / part.name)
    file.symlink_to(file)
    yield
    for part in parts:
        (aside / part.name).replace(part)


async def test_an_overlooked_entry_is_found_by_the_reconciliation(
    schedule: Schedule, dispatch: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_tail, "RECONCILE_SECONDS", 0.05)
    monkeypatch.setattr(EmbeddedBroker, "read_journal", lambda *_args, **_options: list[JournalEntry]())
    (waiting,) = start(MessageDispatchedTrigger(message_ids=schedule("a")))
    await until(lambda: tails() and tails()[0]._position and not (tails()[0]._searches or tails()[0]._begun))
    dispatch(HOUR)

    assert (await finish(waiting))["counts"] == {"dispatched": 1}


async def test_an_unknown_connection_fails_its_triggers_and_no_later_ones(
    sqlite_url: str, connect: Callable[..., None], broker: EmbeddedBroker, schedule: Schedule
) -> None:
    (waiting,) = start(MessageDispatchedTrigger(message_ids=["a"], delay_conn_id="delay_later"))
    with pytest.raises(ConfigurationError, match="'delay_later' is not defined"):
        await finish(waiting)

    connect(sqlite_url, "delay_later")
    schedule("a", after=timedelta(0))
    (waiting,) = start(MessageDispatchedTrigger(message_ids=["a"], delay_conn_id="delay_later"))
    assert (await finish(waiting))["counts"] == {"dispatched": 1}


async def test_many_outcomes_are_counted_and_only_the_exceptions_named(
    schedule: Schedule, dispatch: Callable[..., int], broker: EmbeddedBroker
) -> None:
    ids = schedule(*(f"message-{number}" for number in range(101)))
    broker.cancel(["message-7"])
    dispatch(HOUR)

    (waiting,) = start(MessageDispatchedTrigger(message_ids=ids))

    event = await finish(waiting)
    assert event["counts"] == {"dispatched": 100, "cancelled": 1}
    assert list(event["outcomes"]) == ["message-7"]


async def test_no_ids_need_no_waiting(broker: EmbeddedBroker) -> None:
    (waiting,) = start(MessageDispatchedTrigger(message_ids=[]))
    assert (await finish(waiting)) == {"counts": {}, "outcomes": {}}


async def test_an_event_loop_that_ends_takes_its_thread_along(broker: EmbeddedBroker, schedule: Schedule) -> None:
    schedule("a", after=timedelta(0))

    def dag_test() -> Any:
        return asyncio.run(finish(start_one()))

    async def start_one() -> Any:
        return (await anext(MessageDispatchedTrigger(message_ids=["a"]).run())).payload

    assert (await asyncio.to_thread(dag_test))["counts"] == {"dispatched": 1}


@pytest.mark.parametrize("cancel_on_kill", [False, True])
async def test_stopping_a_task_cancels_waiting_messages_only_if_asked(
    schedule: Schedule, broker: EmbeddedBroker, cancel_on_kill: bool
) -> None:
    schedule("sent", after=timedelta(0))
    schedule("waiting")

    await MessageDispatchedTrigger(message_ids=["sent", "waiting"], cancel_on_kill=cancel_on_kill).on_kill()

    with broker.ledger.read() as connection:
        states = [listing.get(connection, each).state for each in ("sent", "waiting")]
    assert states == [State.DISPATCHED, State.CANCELLED if cancel_on_kill else State.SCHEDULED]


async def test_triggers_survive_being_stored() -> None:
    for trigger in (
        MessageDispatchedTrigger(message_ids=["a"], delay_conn_id="c", since="1:2", cancel_on_kill=True),
        ChannelTrigger(channel="invoices", filter="a.b", look_ahead=7, give_up_at="2030-01-01T00:00:00+00:00"),
    ):
        _, arguments = trigger.serialize()
        stored: Any = json.loads(json.dumps(serialize(arguments)))
        assert type(trigger)(**deserialize(stored)).serialize() == trigger.serialize()


def is_urgent(message: Any) -> bool:
    return bool(message.payload == b"urgent")


def breaks(_message: Any) -> bool:
    raise ZeroDivisionError("the filter is wrong")


async def test_a_message_that_can_be_received_wakes_one_waiter_and_stays(
    schedule: Schedule, broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChannelWatch, "interval", 0.02)
    waiting = start(*(ChannelTrigger(channel="invoices", give_up_at="soon") for _ in range(2)))
    await until(lambda: len(tail_threads()) == 1)
    schedule("a", payload="secret", after=timedelta(0))

    done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=20)

    assert [task.result() for task in done] == [{"message_id": "a", "give_up_at": "soon"}]
    assert len(left) == 1
    assert [message.id for message in broker.peek("invoices")] == ["a"]
    schedule("b", after=timedelta(0))
    assert (await finish(left.pop()))["message_id"] == "b"


async def test_an_event_loop_that_ends_forgets_the_channels_that_it_watched(
    schedule: Schedule, broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in ``dag.test()``, where each trigger has a loop of its own: the task takes its message after that ended."""
    monkeypatch.setattr(ChannelWatch, "interval", 0.02)
    schedule("a", after=timedelta(0))

    async def start_one() -> Any:
        return (await anext(ChannelTrigger(channel="invoices").run())).payload

    assert (await asyncio.to_thread(lambda: asyncio.run(finish(start_one()))))["message_id"] == "a"
    (delivery,) = broker.receive("invoices", limit=1)
    broker.ack([delivery])


async def test_a_filter_lets_only_its_message_wake(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChannelWatch, "interval", 0.02)
    (waiting,) = start(ChannelTrigger(channel="invoices", filter=f"{__name__}.is_urgent"))
    schedule("a", after=timedelta(0))
    schedule("b", payload="urgent", after=timedelta(0))

    assert (await finish(waiting))["message_id"] == "b"


async def test_a_filter_that_fails_ends_its_own_waiters_only(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChannelWatch, "interval", 0.02)
    broken, healthy = start(
        ChannelTrigger(channel="invoices", filter=f"{__name__}.breaks"),
        ChannelTrigger(channel="invoices", filter=f"{__name__}.is_urgent"),
    )
    schedule("a", after=timedelta(0))
    with pytest.raises(ZeroDivisionError):
        await finish(broken)

    schedule("b", payload="urgent", after=timedelta(0))
    assert (await finish(healthy))["message_id"] == "b"


async def test_a_waiting_task_says_that_no_dispatcher_runs(
    schedule: Schedule,
    dispatch: Callable[..., int],
    broker: EmbeddedBroker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """B41: at the beginning and now and then, not at each poll."""
    monkeypatch.setattr(journal_tail, "WARNING_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(journal_tail, "DISPATCHER_CHECK_SECONDS", 0.01)
    said = ""

    def says(text: str, times: int) -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return said.count(text) == times

    (waiting,) = start(MessageDispatchedTrigger(message_ids=schedule("a")))
    await until(lambda: says("no dispatcher has ever been seen in this ledger; start one with `airflow delay", 1))
    write_heartbeat(broker.ledger)
    await until(lambda: says("A dispatcher serves the awaited messages again", 1))
    let_pass(broker.ledger, GONE_AFTER)
    await until(lambda: says("no dispatcher has been seen since", 1))
    monkeypatch.setattr(journal_tail, "WARNING_REPEAT_SECONDS", 0.0)
    await until(lambda: says("no dispatcher has been seen since", 2) or said.count("has been seen since") > 2)
    dispatch(HOUR)
    await finish(waiting)


async def test_a_task_that_has_waited_long_enough_is_resumed(schedule: Schedule) -> None:
    soon = (datetime.now(UTC) + timedelta(seconds=0.2)).isoformat()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message, "LOOK_UP_SECONDS", 0.2)
        (waiting,) = start(MessageDispatchedTrigger(message_ids=schedule("a"), since="0", give_up_at=soon))
        assert await finish(waiting) == {"timed_out": True, "since": "0"}


async def test_a_triggerer_that_was_down_at_the_timeout_still_finds_outcomes(
    schedule: Schedule, dispatch: Callable[..., int]
) -> None:
    ids = schedule("a")
    dispatch(HOUR)
    long_ago = (datetime.now(UTC) - HOUR).isoformat()
    (waiting,) = start(MessageDispatchedTrigger(message_ids=ids, give_up_at=long_ago))
    assert (await finish(waiting))["counts"] == {"dispatched": 1}


async def test_a_triggerer_that_reads_another_ledger_than_the_task_wrote_to_says_so(
    schedule: Schedule, dispatch: Callable[..., int]
) -> None:
    """A12: it would wait for ever."""
    ids = schedule("a")
    ours = ledger_id_of(DelayHook())
    (right, wrong) = start(
        MessageDispatchedTrigger(message_ids=ids, ledger_id=ours),
        MessageDispatchedTrigger(message_ids=ids, ledger_id="another"),
    )
    with pytest.raises(ConfigurationError, match=r"reads sqlite:.* stored its messages in another ledger.*ledger_url"):
        await finish(wrong)
    dispatch(HOUR)
    assert (await finish(right))["counts"] == {"dispatched": 1}
