"""The numbers that are read when Prometheus asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import Connection

from airflow_delay_provider.brokers.ledger import scheduling
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.port import Outcome, Receipt
from airflow_delay_provider.dispatcher.dispatch_to_brokers import DispatchToBrokers
from airflow_delay_provider.dispatcher.gauges import DispatcherGauges
from airflow_delay_provider.dispatcher.housekeeping import Prune
from airflow_delay_provider.dispatcher.loop import STALLED_SECONDS, Context, LoopHealth, LoopThread
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.clock import floor_ms
from airflow_delay_provider.domain.exceptions import LedgerError, UnknownChannelError
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.testing.clock import SettableClock

SECOND = timedelta(seconds=1)


def render(context: Context, *threads: LoopThread) -> list[str]:
    registry = CollectorRegistry()
    registry.register(DispatcherGauges(context, lambda: threads))
    return generate_latest(registry).decode().splitlines()


def thread_of(context: Context, loop: Prune | DispatchToBrokers) -> LoopThread:
    return LoopThread(loop, stop=threading.Event(), backoff=context.config.backoff, observers=[])


def schedule_away(context: Context, *messages: Message) -> None:
    context.ledger.transact(
        scheduling.insert,
        messages,
        destination="mq",
        on_conflict=OnConflict.FAIL,
        now_ms=floor_ms(context.clock.now()),
    )


def test_a_ledger_held_message_is_overdue_although_embedded_ones_are_not(
    context: Context, clock: SettableClock
) -> None:
    """B41"""
    EmbeddedBroker(context.ledger, clock=clock).schedule(
        [Message(channel="c", payload=b"", deliver_at=clock.now() + 60 * SECOND)]
    )
    schedule_away(context, Message(channel="q", payload=b"", deliver_at=clock.now() + SECOND))
    assert {'delay_overdue_seconds{hold="ledger"} 0.0', "delay_scheduled 2.0"} <= set(render(context))
    clock.advance(3.5 * SECOND)
    shown = set(render(context))
    assert {'delay_overdue_seconds{hold="ledger"} 2.5', 'delay_overdue_seconds{hold="broker"} 0.0'} <= shown


def test_messages_are_counted_in_every_state_from_the_start(context: Context, clock: SettableClock) -> None:
    broker = EmbeddedBroker(context.ledger, clock=clock)
    broker.schedule([Message(channel="c", payload=b"", deliver_at=clock.now())])
    [taken] = broker.receive("c")
    broker.dead_letter(taken, channel="c.dead", reason="bad")
    assert [line for line in render(context) if line.startswith("delay_messages{")] == [
        'delay_messages{state="scheduled"} 0.0',
        'delay_messages{state="dispatched"} 0.0',
        'delay_messages{state="cancelled"} 0.0',
        'delay_messages{state="dead"} 1.0',
    ]


def test_held_channels_are_counted_and_fall_to_zero(context: Context, clock: SettableClock) -> None:
    class Refusing(EmbeddedBroker):
        is_refusing = True

        def send(self, messages: Sequence[Message]) -> list[Receipt]:
            if self.is_refusing:
                raise UnknownChannelError("there is no queue")
            return [Receipt(message_id=message.id, outcome=Outcome.DISPATCHED) for message in messages]

    broker = Refusing(context.ledger, clock=clock)
    loop = DispatchToBrokers(context, "mq", lambda _: broker)
    thread = thread_of(context, loop)
    assert 'delay_held_channels{loop="dispatch_to_brokers:mq"} 0.0' in render(context, thread)
    schedule_away(context, *[Message(channel=name, payload=b"", deliver_at=clock.now()) for name in ("a", "b")])
    loop.run_once()
    shown = render(context, thread)
    assert 'delay_held_channels{loop="dispatch_to_brokers:mq"} 2.0' in shown
    assert 'delay_loop_healthy{loop="dispatch_to_brokers:mq"} 0.0' in shown
    broker.is_refusing = False
    clock.advance(60 * SECOND)
    loop.run_once()
    assert 'delay_held_channels{loop="dispatch_to_brokers:mq"} 0.0' in render(context, thread)


def test_a_loop_without_a_success_has_no_time_of_one(context: Context) -> None:
    thread = thread_of(context, Prune(context))
    assert 'delay_loop_healthy{loop="prune"} 1.0' in render(context, thread)
    name = 'delay_loop_last_success_timestamp_seconds{loop="prune"}'
    assert not any(line.startswith(name) for line in render(context, thread))
    thread._run_guarded(lambda: 1.0)
    assert any(line.startswith(name) for line in render(context, thread))


def test_a_ledger_that_cannot_be_read_shows_no_old_numbers(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """B40"""
    assert {"delay_ledger_up 1.0", "delay_scheduled 0.0"} <= set(render(context))

    @contextmanager
    def broken(_ledger: Ledger) -> Iterator[Connection]:
        raise LedgerError("the database is down")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "read", broken)
        shown = render(context, thread_of(context, Prune(context)))
    assert "delay_ledger_up 0.0" in shown
    assert 'delay_loop_healthy{loop="prune"} 1.0' in shown
    assert not any(line.startswith(("delay_scheduled", "delay_messages", "delay_overdue")) for line in shown)


@pytest.mark.parametrize(("seconds", "is_well"), [(STALLED_SECONDS - 10, True), (STALLED_SECONDS, False)])
@pytest.mark.parametrize("has_succeeded", [True, False])
def test_a_loop_whose_run_does_not_end_is_not_well(seconds: float, is_well: bool, has_succeeded: bool) -> None:
    """B39: in its first run, too."""
    since = time.monotonic() - seconds
    health = LoopHealth(began_at=since, ended_at=since if has_succeeded else None)
    assert health.well is is_well
    assert health.as_dict()["well"] is is_well
    assert (health.problem is None) is is_well
