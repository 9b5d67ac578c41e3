"""The harness for messages of another broker that wait in the ledger; a real dispatcher loop sends them."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from uuid import uuid4

from sqlalchemy import delete

from airflow_delay_provider.brokers.ledger import delivery
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.ledger_held import LedgerHeldBroker
from airflow_delay_provider.brokers.ledger.tables import scheduled_message
from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.dispatcher.dispatch_to_brokers import DispatchToBrokers
from airflow_delay_provider.dispatcher.housekeeping import RescueStale
from airflow_delay_provider.dispatcher.loop import Context
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.domain.arguments import Limits
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.message import Delivery
from airflow_delay_provider.testing.clock import SettableClock
from tests.contract.harness import BrokerHarness


class LedgerHeldHarness(BrokerHarness):
    """Subclasses say which broker is the target. The wait is the ledger's, whose clock is set: no test waits."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.clock = SettableClock()
        # Others of this ledger have messages too, and theirs are not for this target.
        self.destination = f"target-{uuid4().hex}"
        super().__init__()
        self.context = Context(ledger=ledger, clock=self.clock, config=DispatcherConfig())
        self.target = self.make_target(None)
        self._opened.append(self.target)

    def make_target(self, limits: Limits | None) -> Broker:
        """Return a new client of the broker that messages go to."""
        raise NotImplementedError

    def make_broker(self, limits: Limits | None) -> LedgerHeldBroker:
        target = self.make_target(limits)
        return LedgerHeldBroker(self.ledger, self.destination, target, limits=limits, clock=self.clock)

    def dispatch(self) -> None:
        """Run the loops of a dispatcher until nothing is due."""
        RescueStale(self.context).run_once()
        loop = DispatchToBrokers(self.context, self.destination, lambda _conn_id: self.target)
        while loop.run_once() == 0.0:
            pass

    def pass_time(self, delta: timedelta) -> None:
        """Move time forward, stopping wherever a message is due, as a dispatcher that keeps up."""
        end = self.clock.now() + delta
        self.dispatch()
        while (due := self._next_due()) is not None and self.clock.now() < due <= end:
            self.clock.set(due)
            self.dispatch()
        self.clock.set(end)
        self.dispatch()

    def _next_due(self) -> datetime | None:
        with self.ledger.read() as connection:
            due_ms = delivery.next_due_ms(connection, destination=self.destination)
        return None if due_ms is None else from_ms(due_ms)


class ForgetfulBroker(EmbeddedBroker):
    """Like most brokers, it knows the messages in its channels, and not the acknowledged ones."""

    def ack(self, deliveries: list[Delivery]) -> None:  # type: ignore[override]
        super().ack(deliveries)
        ids = [each.message.id for each in deliveries]
        self.ledger.transact(
            lambda connection: connection.execute(delete(scheduled_message).where(scheduled_message.c.id.in_(ids)))
        )


class ForgetfulHarness(LedgerHeldHarness):
    """The target has channels in a database of its own."""

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self.target_ledger = Ledger(f"sqlite:///{folder / 'target.db'}")
        super().__init__(ledger)

    def make_target(self, limits: Limits | None) -> ForgetfulBroker:
        return ForgetfulBroker(self.target_ledger, limits=limits, clock=self.clock)
