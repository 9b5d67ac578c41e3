"""Metrics through Airflow."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.observability import stats

from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.port import Receipt
from airflow_delay_provider.cli.dispatcher import dispatcher
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.domain.arguments import OnConflict, compose_message
from airflow_delay_provider.domain.exceptions import BrokerError
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.hooks.task import ConfirmedStore, schedule_once
from airflow_delay_provider.metrics import AirflowMetrics, connect_metrics
from airflow_delay_provider.operators.schedule import ScheduleMessageOperator
from tests.unit.cli.commandline import parser

# Airflow never closes its metrics client, so its socket is collected when the client is replaced.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], set[str]]]:
    """A statsd server of our own, and what it received."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(0.5)
        monkeypatch.setenv("AIRFLOW__METRICS__STATSD_ON", "True")
        monkeypatch.setenv("AIRFLOW__METRICS__STATSD_HOST", "127.0.0.1")
        monkeypatch.setenv("AIRFLOW__METRICS__STATSD_PORT", str(server.getsockname()[1]))
        connect_metrics()

        def read() -> set[str]:
            lines: set[str] = set()
            try:
                while True:
                    lines |= set(server.recv(65_536).decode().splitlines())
            except TimeoutError:
                return lines

        yield read
        monkeypatch.undo()
        connect_metrics()


def test_everything_is_counted(received: Callable[[], set[str]]) -> None:
    """B38, B39, B40, B41"""
    metrics = AirflowMetrics()
    metrics.scheduled(3, channel="invoices")
    metrics.dispatched({"invoices": 2}, [10.0, 20.0])
    metrics.failed("LedgerError")

    assert received() == {
        "airflow.delay.scheduled:3|c",
        "airflow.delay.dispatched:2|c",
        "airflow.delay.lateness:10.000000|ms",
        "airflow.delay.lateness:20.000000|ms",
        "airflow.delay.errors:1|c",
    }


def test_the_operator_counts_scheduled_messages_and_errors(
    received: Callable[[], set[str]], broker: EmbeddedBroker, context: Any
) -> None:
    operator = ScheduleMessageOperator(
        task_id="remind", channel="invoices", deliver_after=60, messages=[{"payload": 1}, {"payload": 2}]
    )
    operator.execute(context)
    assert received() == {"airflow.delay.scheduled:2|c"}

    operator.execute(context)
    assert received() == set()

    with pytest.raises(AirflowFailException):
        ScheduleMessageOperator(task_id="bad", channel="not a channel", payload="x").execute(context)
    assert received() == {"airflow.delay.errors:1|c"}


def test_the_hook_counts_each_new_message_once(received: Callable[[], set[str]], broker: EmbeddedBroker) -> None:
    """B38"""
    hook = DelayHook()
    later, now = hook.compose("invoices", 1, deliver_after=60), hook.compose("orders", 2)
    hook.schedule([later, now])
    assert received() == {"airflow.delay.scheduled:1|c"}
    hook.schedule([later, now, hook.compose("invoices", 3), hook.compose("invoices", 4)])
    assert received() == {"airflow.delay.scheduled:2|c"}
    hook.schedule([later], on_conflict="replace")
    assert received() == {"airflow.delay.scheduled:1|c"}
    hook.close()


class Forgetful(EmbeddedBroker):
    """Knows no ids and confirms, as told, only some messages."""

    knows_ids = False
    unconfirmed: tuple[str, ...] = ()

    def schedule(self, messages: Sequence[Message], *, on_conflict: OnConflict = OnConflict.KEEP) -> list[Receipt]:
        if self.unconfirmed:
            error = BrokerError("the connection is lost", unconfirmed=self.unconfirmed)
            self.unconfirmed = ()
            raise error
        return super().schedule(messages, on_conflict=on_conflict)


def test_messages_that_were_confirmed_before_an_error_are_counted_and_a_retry_counts_the_others(
    monkeypatch: pytest.MonkeyPatch, broker: EmbeddedBroker
) -> None:
    """B38"""
    counted: list[tuple[str, float]] = []
    monkeypatch.setattr(stats, "incr", lambda _name, count, *, tags: counted.append((tags["channel"], count)))
    forgetful = Forgetful(broker.ledger, clock=broker.clock)
    messages = [
        compose_message(channel, "x", deliver_after=60, now=broker.clock.now()) for channel in ("a", "a", "b", "a")
    ]
    stored: dict[str, Any] = {}
    store = SimpleNamespace(get=stored.get, set=stored.__setitem__)
    forgetful.unconfirmed = (messages[1].id, messages[2].id)
    ids = [message.id for message in messages]
    with pytest.raises(BrokerError):
        schedule_once(forgetful, messages, on_conflict=OnConflict.KEEP, confirmed=ConfirmedStore(store, ids))
    assert counted == [("a", 2)]
    schedule_once(forgetful, messages, on_conflict=OnConflict.KEEP, confirmed=ConfirmedStore(store, ids))
    assert counted == [("a", 2), ("a", 1), ("b", 1)]


@pytest.mark.parametrize("forgets", [True, False])
def test_a_task_whose_confirmations_airflow_forgets_is_warned(
    monkeypatch: pytest.MonkeyPatch, broker: EmbeddedBroker, caplog: pytest.LogCaptureFixture, forgets: bool
) -> None:
    """The ledger knows its ids, other brokers do not."""
    monkeypatch.setenv("AIRFLOW__STATE_STORE__CLEAR_ON_SUCCESS", str(forgets))
    for each in (broker, Forgetful(broker.ledger, clock=broker.clock)):
        caplog.clear()
        message = compose_message("a", "x", deliver_after=60, now=broker.clock.now())
        confirmed = ConfirmedStore(None, [message.id])
        schedule_once(each, [message], on_conflict=OnConflict.KEEP, confirmed=confirmed)
        assert ("clear_on_success" in caplog.text) == (forgets and not each.knows_ids)


def test_metrics_that_cannot_be_sent_break_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any, **_options: Any) -> None:
        raise OSError("no metrics today")

    monkeypatch.setattr(stats, "incr", broken)
    monkeypatch.setattr(stats, "timing", broken)
    AirflowMetrics().scheduled(1)
    AirflowMetrics().dispatched({"invoices": 1}, [3.0])
    AirflowMetrics().failed("LedgerError")


def test_the_dispatcher_of_the_command_line_sends_its_metrics_through_airflow(
    received: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch, sqlite_url: str
) -> None:
    """B38, B40: it connects them itself, since Airflow does not do so for this command."""
    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", sqlite_url)
    with monkeypatch.context() as without:
        without.setenv("AIRFLOW__METRICS__STATSD_ON", "False")
        connect_metrics()
    AirflowMetrics().failed("not connected")

    def dispatch_one_message(service: Dispatcher) -> bool:
        service._context.report_dispatched({"invoices": 1}, [5])
        return True

    monkeypatch.setattr(Dispatcher, "run_until_signalled", dispatch_one_message)
    dispatcher(parser().parse_args(["delay", "dispatcher", "--health-port", "-1"]))
    assert received() == {"airflow.delay.dispatched:1|c", "airflow.delay.lateness:5.000000|ms"}
