"""The hook that DAG authors and operators use, and a warning if no dispatcher serves its connection."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook

from airflow_delay_provider.domain.arguments import Hold, OnConflict, compose_message, parse_choice
from airflow_delay_provider.domain.dead_letters import DeadLetters
from airflow_delay_provider.domain.exceptions import ConfigurationError, DelayError
from airflow_delay_provider.hooks.connections import (
    DEFAULT_CONN_ID,
    connections_of_the_server,
    open_broker,
    open_plain_broker,
    require_undefined,
)
from airflow_delay_provider.hooks.ledger import open_configured_ledger
from airflow_delay_provider.metrics import schedule_and_count

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from airflow_delay_provider.brokers.consumer import Consumed
    from airflow_delay_provider.brokers.ledger.database import Ledger
    from airflow_delay_provider.brokers.ledger.heartbeats import DispatcherRecord
    from airflow_delay_provider.brokers.port import Broker, Receipt
    from airflow_delay_provider.domain.clock import Clock
    from airflow_delay_provider.domain.dead_letters import Replayed
    from airflow_delay_provider.domain.message import Message

log = logging.getLogger(__name__)


class DelayHook(BaseHook):
    """Schedule, send, control and consume messages over one connection.

    :param delay_conn_id: connection of the broker; by default ``delay_default``, which you need not define.
    :param hold: ``broker`` or ``ledger``: what stores messages until they are due. By default the connection decides.
    """

    conn_name_attr = "delay_conn_id"
    default_conn_name = DEFAULT_CONN_ID
    conn_type = "delay"
    hook_name = "Delayed messages (embedded)"

    def __init__(
        self, delay_conn_id: str | None = None, *, hold: Hold | str | None = None, clock: Clock | None = None
    ) -> None:
        super().__init__()
        self.delay_conn_id = self.default_conn_name if delay_conn_id is None else delay_conn_id
        self.hold = hold
        self.clock = clock
        self._broker: Broker | None = None
        self._ledger: Ledger | None = None

    def get_conn(self) -> Broker:
        """Return the broker; the first call opens it."""
        if self._broker is None:
            connection = self._find_connection()
            self._broker = open_broker(self.delay_conn_id, connection, clock=self.clock, hold=self.hold)
        return self._broker

    def get_ledger(self) -> Ledger:
        """Return the ledger that lists the messages of this connection.

        For a broker that holds messages itself, this is the configured ledger: a dispatcher copies their journal to it.
        """
        if (ledger := self.get_conn().ledger) is not None:
            return ledger
        if self._ledger is None:
            self._ledger = open_configured_ledger(for_messages=False)
        return self._ledger

    def get_listed_destination(self) -> str | None:
        """Return the destination that selects this connection's messages in the ledger; None selects all messages."""
        broker = self.get_conn()
        return self.delay_conn_id if broker.ledger is None else broker.destination

    def schedule_message(
        self,
        channel: str,
        payload: Any,
        *,
        deliver_at: datetime | str | None = None,
        deliver_after: timedelta | float | str | None = None,
        message_id: str | None = None,
        on_conflict: OnConflict | str = OnConflict.KEEP,
        **options: Any,
    ) -> str:
        """Schedule one message and return its id, once the broker has confirmed it.

        In a task, the id derives from the task instance and the number of this call. So a retried or cleared task that
        makes the same calls in the same order schedules nothing twice. A deferred task counts again in the method that
        resumes it. If the same method resumes it several times, give each message an id.

        :param options: ``key``, ``headers``, ``content_type``, ``priority`` and ``on_past``.
        """
        from airflow_delay_provider.brokers.port import Outcome
        from airflow_delay_provider.hooks.task import Call, ConfirmedStore, schedule_once

        policy = parse_choice("on_conflict", OnConflict, on_conflict)
        call, broker = Call.begin(), self.get_conn()
        if call is not None:
            options["origin"] = call.origin
            message_id = call.message_id if message_id is None else message_id
        message = self.compose(
            channel, payload, deliver_at=deliver_at, deliver_after=deliver_after, message_id=message_id, **options
        )
        confirmed = ConfirmedStore(None, [message.id]) if call is None else call.confirmed(broker, message.id)
        [receipt] = schedule_once(broker, [message], on_conflict=policy, confirmed=confirmed)
        if receipt.outcome is Outcome.KEPT:
            log.info("Message %s for channel %s was scheduled before, so nothing new is scheduled", message.id, channel)
        return message.id

    def schedule(
        self, messages: Sequence[Message], *, on_conflict: OnConflict | str = OnConflict.KEEP
    ) -> list[Receipt]:
        """Schedule all messages or none, and return the broker's confirmations."""
        policy = parse_choice("on_conflict", OnConflict, on_conflict)
        return schedule_and_count(self.get_conn(), messages, on_conflict=policy)

    def compose(self, channel: str, payload: Any, **options: Any) -> Message:
        """Make a message; ``options`` are those of :func:`~airflow_delay_provider.compose_message`."""
        return compose_message(channel, payload, now=self.get_conn().clock.now(), **options)

    def consume(
        self,
        channel: str,
        handler: Callable[[Message], object],
        *,
        limit: int | None = None,
        timeout: timedelta | None = None,
        max_handled: int = 10,
        dead_letter_channel: str | None = None,
        prefetch: int = 100,
    ) -> Consumed:
        """Call ``handler`` with each message until ``limit`` messages are done or ``timeout`` has passed.

        If the handler returns, the message is acknowledged. If it raises ``DeferMessage(delay)``, the message comes
        back after that delay. If it raises anything else, or defers a message ``max_handled`` times, the message goes
        to the dead-letter channel.
        """
        from airflow_delay_provider.brokers.consumer import Consumer, ConsumerConfig

        config = ConsumerConfig(max_handled=max_handled, dead_letter_channel=dead_letter_channel, prefetch=prefetch)
        return Consumer(self.get_conn(), channel, handler, config=config).run(limit=limit, timeout=timeout)

    def replay(
        self,
        message_ids: Sequence[str] = (),
        *,
        channel: str | None = None,
        dead_letter_channel: str | None = None,
        dag_id: str | None = None,
        run_id: str | None = None,
        task_id: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Replayed:
        """Send dead letters to their channels again, due now; :class:`DeadLetters` describes the filters.

        The result names the ids that are no dead letters; they do no harm.
        """
        return self.get_conn().replay(
            DeadLetters(
                message_ids=tuple(message_ids),
                channel=channel,
                dead_letter_channel=dead_letter_channel,
                dag_id=dag_id,
                run_id=run_id,
                task_id=task_id,
                reason=reason,
                since=since,
                until=until,
            )
        )

    def test_connection(self) -> tuple[bool, str]:
        """Connect to the broker; Airflow's connection form shows the result."""
        try:
            return True, self.get_conn().check()
        except DelayError as error:
            return False, str(error)

    def close(self) -> None:
        """Close the connections to broker and ledger."""
        if self._broker is not None:
            self._broker.close()
            self._broker = None
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def _find_connection(self) -> Connection | None:
        from airflow.sdk.exceptions import AirflowNotFoundException

        try:
            return self.get_connection(self.delay_conn_id)
        except AirflowNotFoundException as error:
            if self.delay_conn_id == DEFAULT_CONN_ID:
                require_undefined(self.delay_conn_id)
                return None
            raise ConfigurationError(
                f"delay_conn_id: connection {self.delay_conn_id!r} is not defined; create it with"
                f" `airflow connections add {self.delay_conn_id} --conn-type TYPE ...`, where TYPE is rabbitmq,"
                f" delay_kafka or delay (the ledger), or use {DEFAULT_CONN_ID!r}"
            ) from error


def open_destination(conn_id: str) -> Broker:
    """Open the broker that a dispatcher sends to, also if its connection is defined in Airflow's database.

    The connection's size limit was checked when the messages were scheduled. It is lifted here, because a limit that
    was lowered since must not drop them.
    """
    with connections_of_the_server():
        broker = open_plain_broker(conn_id, DelayHook(conn_id)._find_connection())
    broker.limits = replace(broker.limits, max_payload_bytes=sys.maxsize)
    return broker


def ledger_id_of(hook: DelayHook) -> str | None:
    """Return the id of the ledger that stores the messages of this connection; None if the broker stores them."""
    from airflow_delay_provider.brokers.ledger.database import read_identity

    ledger = hook.get_conn().ledger
    if ledger is None:
        return None
    with ledger.read() as connection:
        return read_identity(connection).id


def find_dispatcher_warning(hook: DelayHook) -> str | None:
    """Say why nothing dispatches the messages of this connection, and what to do; None if no problem is known.

    RabbitMQ needs no dispatcher for messages that it holds itself. Kafka does, but its dispatcher may use another
    ledger, which cannot be read here. A ledger that does not answer raises nothing, because this is only advice.
    """
    from airflow_delay_provider.brokers.port import NeedsDispatcher

    broker = hook.get_conn()
    try:
        if broker.ledger is not None:
            return _warn_of_ledger(hook)
        return _warn_of_ladder(hook) if isinstance(broker, NeedsDispatcher) else None
    except DelayError as error:
        log.debug("Cannot check for dispatchers: %s", error)
        return None


def dispatcher_command(conn_id: str, *, hold: str | None = None, is_embedded: bool = True) -> str:
    """Return the command that starts a dispatcher for the ledger of a connection."""
    # With hold from the task, messages are in the configured ledger; with hold from the connection, in its own.
    names_ledger = conn_id != DEFAULT_CONN_ID if is_embedded else hold is None
    return f"airflow delay dispatcher --conn-id {conn_id}" if names_ledger else "airflow delay dispatcher"


def _warn_of_ledger(hook: DelayHook) -> str | None:
    from airflow_delay_provider.brokers.ledger.heartbeats import find_gap

    destination = hook.get_conn().destination
    gap = find_gap(_read_dispatchers(hook.get_ledger()), destination=destination)
    if gap is None:
        return None
    command = dispatcher_command(
        hook.delay_conn_id, hold=None if hook.hold is None else str(hook.hold), is_embedded=destination is None
    )
    return f"{gap.describe(command)} (ledger at {hook.get_ledger().name})"


def _warn_of_ladder(hook: DelayHook) -> str | None:
    from airflow_delay_provider.brokers.ledger.heartbeats import find_kafka_gap

    ledger = hook.get_ledger()
    if not ledger.is_there:
        return None
    gap = find_kafka_gap(_read_dispatchers(ledger), hook.delay_conn_id)
    if gap is None:
        return None
    warning = gap.describe(f"airflow delay dispatcher --kafka {hook.delay_conn_id}")
    return f"{warning}, unless one runs with another ledger than {ledger.name}" if gap.is_absence else warning


def _read_dispatchers(ledger: Ledger) -> list[DispatcherRecord]:
    from airflow_delay_provider.brokers.ledger.heartbeats import read_dispatchers

    with ledger.read() as connection:
        return read_dispatchers(connection)
