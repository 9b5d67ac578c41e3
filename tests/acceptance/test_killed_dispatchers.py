"""Dispatchers die with SIGKILL at every step while 3 000 messages are due: none lost, none early, none twice."""

from __future__ import annotations

import multiprocessing
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from sqlalchemy import func, select

from airflow_delay_provider.brokers.ledger import listing, scheduling
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.tables import event, scheduled_message
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.clock import floor_ms
from airflow_delay_provider.domain.lifecycle import Change, State
from airflow_delay_provider.domain.message import Message
from tests.acceptance import crashing_dispatcher
from tests.acceptance.crashing_dispatcher import STEPS_AWAY, STEPS_HERE
from tests.databases import fresh_database
from tools.servers import component

MESSAGES = 3_000
SPREAD = timedelta(seconds=4)
PATIENCE_SECONDS = 240
pytestmark = pytest.mark.timeout(3 * PATIENCE_SECONDS)
CHANNEL = "orders"

#: Copies of a process that has imported everything: crashes cost no start of Python each.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([crashing_dispatcher.__name__])

wait_for = partial(component.wait_for, seconds=PATIENCE_SECONDS, interval=0.05)


class RecordingConsumer:
    """Receives all the time and notes when each message came, by a clock that is not the dispatcher's."""

    def __init__(self, url: str) -> None:
        self._broker = EmbeddedBroker(Ledger(url))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.received: Counter[str] = Counter()
        self.early: list[str] = []

    def _run(self) -> None:
        while not self._stop.is_set():
            deliveries = self._broker.receive(CHANNEL, limit=1000)
            now = datetime.now(UTC)
            for delivery in deliveries:
                self.received[delivery.message.id] += 1
                if now < delivery.message.deliver_at:
                    self.early.append(delivery.message.id)
            if deliveries:
                self._broker.ack(deliveries)
            else:
                self._stop.wait(0.02)
        self._broker.close()

    def __enter__(self) -> RecordingConsumer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def make_messages(seed: int) -> list[Message]:
    source, start = random.Random(seed), datetime.now(UTC) + timedelta(seconds=1)
    return [
        Message(id=f"m{n}", channel=CHANNEL, payload=b"%d" % n, deliver_at=start + SPREAD * source.random())
        for n in range(MESSAGES)
    ]


@contextmanager
def dispatcher(ledger_url: str, *more: str) -> Iterator[ForkServerProcess]:
    process = FORKS.Process(target=crashing_dispatcher.main, args=(["--ledger", ledger_url, *more],))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@contextmanager
def two_dispatchers(ledger_url: str, folder: Path, *more: str) -> Iterator[None]:
    """Both work when this begins, and hold what they claim for longer than a busy machine needs to send it."""
    ready = [folder / f"ready-{n}" for n in range(2)]
    with ExitStack() as stack:
        for each in ready:
            stack.enter_context(dispatcher(ledger_url, *more, "--claim-seconds", "60", "--ready", str(each)))
        wait_for(lambda: all(each.exists() for each in ready), what="both work")
        yield


def crash_again_and_again(
    start: Callable[..., AbstractContextManager[ForkServerProcess]], steps: tuple[str, ...], is_done: Callable[[], bool]
) -> int:
    """Run dispatchers that crash, every step in turn, until all is done; return how many died."""
    source, deadline, killed = random.Random(7), time.monotonic() + PATIENCE_SECONDS, 0
    while not is_done():
        assert time.monotonic() < deadline, f"not done after {killed} crashes"
        # After every step was seen twice, fewer crashes: the rest must be able to end.
        passages = source.randint(1, 3) if killed < 2 * len(steps) else source.randint(10, 40)
        step = steps[killed % len(steps)]
        with start("--step", step, "--passages", str(passages)) as process:
            while process.is_alive() and not is_done():
                assert time.monotonic() < deadline, f"dispatcher to crash at {step} hangs"
                time.sleep(0.02)
            if not process.is_alive():
                assert process.exitcode == -signal.SIGKILL
                killed += 1
    return killed


def count_in(ledger: Ledger, state: State) -> int:
    with ledger.read() as connection:
        return listing.count_by_state(connection)[state]


def dispatched_entries(ledger: Ledger) -> dict[str, int]:
    query = select(event.c.message_id, func.count().label("n")).where(event.c.change == Change.DISPATCHED.value)
    with ledger.read() as connection:
        return {row.message_id: row.n for row in connection.execute(query.group_by(event.c.message_id))}


def earliest_dispatch_ms(ledger: Ledger) -> int:
    late = scheduled_message.c.dispatched_at_ms - scheduled_message.c.deliver_at_ms
    with ledger.read() as connection:
        return int(connection.execute(select(func.min(late))).scalar_one())


def test_a_dispatcher_killed_at_every_step_loses_nothing_and_delivers_each_message_once(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """M9, A44, B23, B32, B61, D11, D12"""
    with RecordingConsumer(ledger_url) as consumer:
        EmbeddedBroker(ledger).schedule(make_messages(seed=1))
        killed = crash_again_and_again(
            lambda *more: dispatcher(ledger_url, *more),
            STEPS_HERE,
            lambda: count_in(ledger, State.DISPATCHED) == MESSAGES,
        )
        wait_for(lambda: consumer.received.total() >= MESSAGES, what="all messages received")
    with capsys.disabled():
        print(f"\n{ledger.dialect}: {killed} dispatchers killed, {MESSAGES} messages, each delivered once, 0 early")
    assert killed >= len(STEPS_HERE)
    assert set(consumer.received) == {f"m{n}" for n in range(MESSAGES)}
    assert consumer.received.total() == MESSAGES
    assert consumer.early == []
    assert earliest_dispatch_ms(ledger) >= 0
    assert set(dispatched_entries(ledger).values()) == {1}


def test_a_dispatcher_killed_between_claim_send_and_mark_loses_nothing_and_repeats_only_the_same_ids(
    ledger: Ledger, ledger_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B30, B32, B33, B36, B61, A44"""
    with other_ledger(ledger, tmp_path) as destination, RecordingConsumer(destination) as consumer:
        schedule_for_elsewhere(ledger, make_messages(seed=2))
        sent_log = tmp_path / "sent"
        killed = crash_again_and_again(
            lambda *more: dispatcher(ledger_url, "--destination", destination, "--sent-log", str(sent_log), *more),
            STEPS_AWAY,
            lambda: count_in(ledger, State.DISPATCHED) == MESSAGES,
        )
        wait_for(lambda: consumer.received.total() >= MESSAGES, what="all messages received")
    sends = Counter(line.split()[1] for line in sent_log.read_text().splitlines())
    repeated = sends.total() - len(sends)
    with capsys.disabled():
        print(
            f"\n{ledger.dialect}: {killed} dispatchers killed, {len(sends)} ids, {repeated} sent again with the same id"
        )
    assert killed >= len(STEPS_AWAY)
    assert set(sends) == {f"m{n}" for n in range(MESSAGES)}
    assert repeated > 0, "the crash between send and mark was not met"
    # The destination knows the ids, so its consumers see each message once.
    assert consumer.received == Counter(sends.keys())
    assert consumer.early == []
    assert earliest_dispatch_ms(ledger) >= 0


def test_two_dispatchers_at_once_never_deliver_the_same_message_twice(
    ledger: Ledger, ledger_url: str, tmp_path: Path
) -> None:
    """B32, A42"""
    with RecordingConsumer(ledger_url) as consumer, two_dispatchers(ledger_url, tmp_path):
        EmbeddedBroker(ledger).schedule(make_messages(seed=3))
        wait_for(lambda: consumer.received.total() >= MESSAGES, what="all messages received")
    assert consumer.received == Counter({f"m{n}": 1 for n in range(MESSAGES)})
    assert consumer.early == []
    assert set(dispatched_entries(ledger).values()) == {1}


def test_two_dispatchers_at_once_never_claim_the_same_message(ledger: Ledger, ledger_url: str, tmp_path: Path) -> None:
    """B32, B37"""
    sent_log = tmp_path / "sent"
    with (
        other_ledger(ledger, tmp_path) as destination,
        two_dispatchers(ledger_url, tmp_path, "--destination", destination, "--sent-log", str(sent_log)),
    ):
        schedule_for_elsewhere(ledger, make_messages(seed=4))
        wait_for(lambda: count_in(ledger, State.DISPATCHED) == MESSAGES, what="all messages dispatched")
    lines = [line.split() for line in sent_log.read_text().splitlines()]
    assert Counter(message_id for _, message_id in lines) == Counter({f"m{n}": 1 for n in range(MESSAGES)})
    assert len({pid for pid, _ in lines}) == 2, "one of the two did all the work"


@contextmanager
def other_ledger(ledger: Ledger, tmp_path: Path) -> Iterator[str]:
    """A second database of the same kind, as another broker."""
    if ledger.dialect == "sqlite":
        yield f"sqlite:///{tmp_path / 'elsewhere.db'}"
        return
    with fresh_database() as url:
        elsewhere = Ledger(url)
        elsewhere.migrate()
        elsewhere.close()
        yield url


def schedule_for_elsewhere(ledger: Ledger, messages: list[Message]) -> None:
    now_ms = floor_ms(datetime.now(UTC))
    ledger.transact(
        lambda connection: scheduling.insert(
            connection, messages, destination="elsewhere", on_conflict=OnConflict.KEEP, now_ms=now_ms
        )
    )
