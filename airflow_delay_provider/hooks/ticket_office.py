"""What a Spark task does with its broker between two submissions."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self
from uuid import UUID, uuid5

from airflow_delay_provider.domain.clock import ceil_ms
from airflow_delay_provider.domain.journal import FROM_THE_START
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message, Origin
from airflow_delay_provider.exceptions import BrokerError, DelayError, UnknownMessageError
from airflow_delay_provider.hooks.cluster_gate import ClusterGate
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.hooks.message_ids import cancel_in_time
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, DEFAULT_DEAD_LETTER_CHANNEL, Ticket

if TYPE_CHECKING:
    from airflow_delay_provider.ledger.gates import Outage
    from airflow_delay_provider.spark.history import History
    from airflow_delay_provider.spark.probes import ClusterAddress

log = logging.getLogger(__name__)

#: Tickets that have done their work are taken out of their channel by whoever comes back, so many at a time.
SWEEP = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketPlaces:
    """Over which broker tickets go, and where to."""

    delay_conn_id: str = DEFAULT_CONN_ID
    hold: str | None = None
    channel: str = DEFAULT_CHANNEL
    dead_letter_channel: str | None = DEFAULT_DEAD_LETTER_CHANNEL


class TicketOffice:
    """One connection to the broker of tickets, to be closed."""

    def __init__(self, places: TicketPlaces) -> None:
        self._places = places
        self._hook = DelayHook(places.delay_conn_id, hold=places.hold)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.close()

    def schedule(self, ticket: Ticket) -> str:
        """Have it confirmed, which changes nothing where it was before; return a journal position from before that."""
        broker = self._hook.get_conn()
        since = broker.outcomes_begin()
        broker.schedule([ticket.as_message(self._places.channel)])
        return since

    def cancel(self, ticket_id: str) -> bool:
        """Take a ticket back and return whether it does not come.

        One that is too late, or that the broker does not give back, comes when it is due, for nobody.
        """
        broker = self._hook.get_conn()
        if not broker.can_recall:
            return False
        try:
            return not cancel_in_time(broker, [ticket_id])
        except UnknownMessageError:  # it was not scheduled yet
            return True

    def is_gone(self, ticket_id: str) -> bool:
        """Whether a ticket was taken back; a broker that cannot look an id up is taken to have none."""
        broker = self._hook.get_conn()
        if not broker.knows_ids:
            return True
        outcome = broker.find_outcomes([ticket_id], since=FROM_THE_START).get(ticket_id)
        return outcome is not None and outcome.change is Change.CANCELLED

    def send_dead_letter(self, origin: Origin, history: History, reason: str) -> None:
        """Tell whoever listens that all attempts are used up; whether it can be told or not, the task fails."""
        channel = self._places.dead_letter_channel
        if channel is None:
            return
        content = {"reason": reason, "origin": asdict(origin), **history.as_json()}
        letter_id = str(uuid5(UUID(origin.message_id(0)), f"dead.{ceil_ms(history.began_at)}"))
        try:
            broker = self._hook.get_conn()
            letter = Message(
                id=letter_id,
                channel=channel,
                payload=json.dumps(content).encode(),
                deliver_at=broker.clock.now(),
                content_type="application/json",
                origin=origin,
            )
            broker.send([letter])
        except DelayError as error:
            log.error("No dead letter was sent to %s: %s", channel, error)  # noqa: TRY400 - the sentence says it all
        else:
            log.info("A dead letter was sent to %s: %s", channel, letter_id)

    def sweep(self) -> None:
        """Take tickets that have done their work out of their channel, so that it does not grow."""
        broker = self._hook.get_conn()
        try:
            broker.ack(broker.receive(self._places.channel, limit=SWEEP))
        except DelayError as error:
            log.warning("Old tickets stay in %s: %s", self._places.channel, error)

    def find_outage(self, cluster: ClusterAddress) -> Outage | None:
        """Return an outage that others have seen and that lasts; not knowing is no reason to submit nothing."""
        try:
            return self._gate(cluster).known_outage()
        except BrokerError as error:
            log.warning("Cannot ask whether %s is known to be down: %s", cluster.name, error)
            return None

    def await_turn(self, cluster: ClusterAddress, *, sleep: Callable[[float], None] = time.sleep) -> None:
        """Keep the distance between submissions, also where tasks that had their turns crowd at the scheduler."""
        try:
            (turn,) = self._gate(cluster).submission_turns(1)
        except BrokerError as error:
            log.warning("Cannot ask for a turn at %s: %s", cluster.name, error)
        else:
            sleep(max(0.0, (turn - self._hook.get_conn().clock.now()).total_seconds()))

    def _gate(self, cluster: ClusterAddress) -> ClusterGate:
        return ClusterGate(self._hook.get_ledger(), cluster, clock=self._hook.get_conn().clock)
