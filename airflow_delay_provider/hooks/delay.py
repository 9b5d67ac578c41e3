"""The hook that DAG authors and operators use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook

from airflow_delay_provider.domain.dead_letters import DeadLetters
from airflow_delay_provider.domain.schedule import Hold, OnConflict, compose_message, parse_choice
from airflow_delay_provider.exceptions import ConfigurationError, DelayError
from airflow_delay_provider.hooks.connections import (
    DEFAULT_CONN_ID,
    connections_of_the_server,
    open_broker,
    open_configured_ledger,
    open_plain_broker,
    require_undefined,
)

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from airflow_delay_provider.brokers.base import Broker, Receipt
    from airflow_delay_provider.brokers.consumer import Consumed
    from airflow_delay_provider.domain.clock import Clock
    from airflow_delay_provider.domain.dead_letters import Replayed
    from airflow_delay_provider.domain.message import Message
    from airflow_delay_provider.ledger.database import Ledger


class DelayHook(BaseHook):
    """Schedule, send, control and consume messages over one connection.

    :param delay_conn_id: the connection of a broker; ``delay_default`` works without being defined.
    :param hold: who keeps the wait, ``broker`` or ``ledger``; None is what the connection says.
    """

    conn_name_attr = "delay_conn_id"
    default_conn_name = DEFAULT_CONN_ID
    conn_type = "delay"
    hook_name = "Delayed messages (embedded)"

    def __init__(
        self, delay_conn_id: str = DEFAULT_CONN_ID, *, hold: Hold | str | None = None, clock: Clock | None = None
    ) -> None:
        super().__init__()
        self.delay_conn_id = delay_conn_id
        self.hold = hold
        self.clock = clock
        self._broker: Broker | None = None
        self._ledger: Ledger | None = None

    def get_conn(self) -> Broker:
        """Return the broker, opened once."""
        if self._broker is None:
            connection = self._find_connection()
            self._broker = open_broker(self.delay_conn_id, connection, clock=self.clock, hold=self.hold)
        return self._broker

    def get_ledger(self) -> Ledger:
        """Return the ledger in which messages of this connection can be listed and counted.

        For a broker that holds messages itself that is the configured one, into which a dispatcher projects them.
        """
        own: Ledger | None = getattr(self.get_conn(), "ledger", None)
        if own is not None:
            return own
        if self._ledger is None:
            self._ledger = open_configured_ledger(for_messages=False)
        return self._ledger

    def get_listed_destination(self) -> str | None:
        """Return what a look at the ledger must be limited to; None is a ledger that is all of this connection's."""
        if getattr(self.get_conn(), "ledger", None) is None:
            return self.delay_conn_id
        destination: str | None = getattr(self.get_conn(), "destination", None)
        return destination

    def schedule(
        self, messages: Sequence[Message], *, on_conflict: OnConflict | str = OnConflict.KEEP
    ) -> list[Receipt]:
        """Store all messages or none and return the broker's confirmations."""
        return self.get_conn().schedule(messages, on_conflict=parse_choice("on_conflict", OnConflict, on_conflict))

    def compose(self, channel: str, payload: Any, **options: Any) -> Message:
        """Make a message; ``options`` are those of :func:`~airflow_delay_provider.domain.schedule.compose_message`."""
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
        """Hand messages to ``handler`` until ``limit`` are settled or ``timeout`` has passed.

        The handler returns: acknowledged. It raises ``DeferMessage(delay)``: put back for that long, without blocking.
        It raises anything else, or has deferred the same message ``max_handled`` times: dead-letter channel.
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
        """Hand messages that were given up to their channels again, due now; see :class:`DeadLetters` for the filters.

        Ids that are not among them are named in the result and change nothing.
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
        """Connect for real; Airflow's connection form shows the answer."""
        try:
            return True, self.get_conn().check()
        except DelayError as error:
            return False, str(error)

    def close(self) -> None:
        """Let go of the broker's connections."""
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
                f" `airflow connections add {self.delay_conn_id} --conn-type delay` or use {DEFAULT_CONN_ID!r}"
            ) from error


def open_destination(conn_id: str) -> Broker:
    """Return the broker that a dispatcher sends to, as it is; its connection may stand in Airflow's database.

    Its messages were accepted when they were scheduled: a size limit of the connection that was lowered since must not
    end them, so only the broker's own limit counts.
    """
    with connections_of_the_server():
        broker = open_plain_broker(conn_id, DelayHook(conn_id)._find_connection())
    broker.limits = replace(broker.limits, max_payload_bytes=sys.maxsize)
    return broker
