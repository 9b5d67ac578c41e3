"""Sensors that wait for messages."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator, PokeReturnValue
from airflow.sdk.exceptions import AirflowSensorTimeout

from airflow_delay_provider.domain.journal import FROM_THE_START
from airflow_delay_provider.domain.message import Delivery, Message, decode_payload
from airflow_delay_provider.exceptions import ConfigurationError, DelayError
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.hooks.dispatchers import find_dispatcher_warning
from airflow_delay_provider.hooks.failures import failing_at_once
from airflow_delay_provider.hooks.message_ids import parse_message_ids
from airflow_delay_provider.triggers.channel import load_filter
from airflow_delay_provider.triggers.message import ChannelTrigger, MessageDispatchedTrigger
from airflow_delay_provider.triggers.outcomes import describe_outcomes, require_dispatched

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delay_provider.brokers.base import Broker
    from airflow_delay_provider.triggers.channel import Filter

log = logging.getLogger(__name__)

#: How long a triggerer's consumer may take to hand over a message.
HAND_OVER = timedelta(seconds=5)
#: How many messages are looked at together once the first was not the one.
LOOK_FURTHER = 10


class MessageDispatchedSensor(BaseSensorOperator):
    """Wait until messages were dispatched; a cancelled or given-up one fails the task at once.

    :param message_ids: an id, a list of ids, or the output of the task that scheduled them (templated).
    :param delay_conn_id: the connection of the broker.
    :param hold: who keeps their wait, as when they were scheduled.
    :param deferrable: wait without a worker slot.
    """

    template_fields: Sequence[str] = ("message_ids", "delay_conn_id", "hold")

    def __init__(
        self,
        *,
        message_ids: str | Sequence[str],
        delay_conn_id: str = DEFAULT_CONN_ID,
        hold: str | None = None,
        deferrable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.message_ids = message_ids
        self.delay_conn_id = delay_conn_id
        self.hold = hold
        self.deferrable = deferrable
        self._has_warned = False

    def execute(self, context: Context) -> None:
        if not self.deferrable:
            super().execute(context)
        elif not self.poke(context):
            self.defer(
                trigger=MessageDispatchedTrigger(
                    message_ids=parse_message_ids(self.message_ids),
                    delay_conn_id=self.delay_conn_id,
                    hold=self.hold,
                ),
                method_name="execute_complete",
                timeout=timedelta(seconds=self.timeout),
            )

    def poke(self, context: Context) -> bool:  # noqa: ARG002 - Airflow's signature
        """Say whether all messages have ended; raise when one of them was not dispatched."""
        with failing_at_once(), closing(DelayHook(self.delay_conn_id, hold=self.hold)) as hook:
            ids = parse_message_ids(self.message_ids)
            ended = hook.get_conn().find_outcomes(ids, since=FROM_THE_START) if ids else {}
            if len(ended) < len(ids):
                self._warn_once(hook)
        require_dispatched(describe_outcomes(list(ended), ended))
        return len(ended) == len(ids)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> None:  # noqa: ARG002 - Airflow's signature
        """Succeed when all messages were dispatched."""
        require_dispatched(event)
        self.log.info("All %d messages were dispatched", sum(event["counts"].values()))

    def _warn_once(self, hook: DelayHook) -> None:
        warning = None if self._has_warned else find_dispatcher_warning(hook)
        if warning is not None:
            self.log.warning("The awaited messages are not dispatched: %s", warning)
            self._has_warned = True


class MessageSensor(BaseSensorOperator):
    """Wait for a message in a channel, take it and return it.

    Returns a dict: id, channel, payload (decoded; binary content as base64 text, with payload_is_base64 true), key,
    headers, content_type, deliver_at, handled_count. The message leaves the channel just before the task succeeds;
    others that were looked at stay in place, in order. How many others may be held meanwhile, and for how long, is in
    docs/sensors.md.

    :param channel: the channel (templated).
    :param filter: dotted path of a function that gets a ``Message`` and says whether it is the one. It also runs in
        the triggerer, so it must be in a module that is installed there, not in the DAG file.
    :param look_ahead: how many messages at the head of the channel are looked at; the one must be among them.
    :param delay_conn_id: the connection of the broker.
    :param deferrable: wait without a worker slot.
    """

    template_fields: Sequence[str] = ("channel", "filter", "delay_conn_id")

    def __init__(
        self,
        *,
        channel: str,
        filter: str | None = None,
        look_ahead: int = 100,
        delay_conn_id: str = DEFAULT_CONN_ID,
        deferrable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.channel = channel
        self.filter = filter
        self.look_ahead = look_ahead
        self.delay_conn_id = delay_conn_id
        self.deferrable = deferrable

    def execute(self, context: Context) -> Any:
        if not self.deferrable:
            return super().execute(context)
        return self._take_or_defer(give_up_at=datetime.now(UTC) + timedelta(seconds=self.timeout))

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:  # noqa: ARG002 - Airflow's signature
        """Take the message that was seen, or wait on when somebody else was faster."""
        return self._take_or_defer(
            give_up_at=datetime.fromisoformat(event["give_up_at"]), message_id=event["message_id"]
        )

    def poke(self, context: Context) -> PokeReturnValue:  # noqa: ARG002 - Airflow's signature
        """Take the first message that passes the filter, if there is one."""
        message = self._take()
        return PokeReturnValue(is_done=message is not None, xcom_value=None if message is None else _as_dict(message))

    def _take(self, message_id: str | None = None) -> Message | None:
        """Take the message that the trigger saw, or else the first that passes the filter."""
        with failing_at_once(), closing(DelayHook(self.delay_conn_id)) as hook:
            passes, broker = load_filter(self.filter), hook.get_conn()
            if message_id is not None:
                message = take_seen(broker, self.channel, message_id, passes, look_ahead=self.look_ahead)
            elif self.filter is None:
                message = take_first(broker, self.channel, passes, look_ahead=1)
            elif not broker.counts_returns():
                message = take_first(broker, self.channel, passes, look_ahead=self.look_ahead)
            elif self.deferrable:
                # Only the triggerer looks: it holds messages for as long as anybody waits.
                message = None
            else:
                raise ConfigurationError(
                    f"{self.delay_conn_id}: this broker counts each look at a message as a delivery, and a queue with a"
                    " delivery limit drops what was delivered too often; use deferrable=True, no filter, or"
                    " RabbitMQ 4.3 or later"
                )
        if message is not None:
            self.log.info("Took message %s from channel %s", message.id, message.channel)
        return message

    def _take_or_defer(self, *, give_up_at: datetime, message_id: str | None = None) -> Any:
        message = self._take(message_id)
        if message is not None:
            return _as_dict(message)
        remaining = give_up_at - datetime.now(UTC)
        if remaining <= timedelta(0):
            raise AirflowSensorTimeout(f"no message in channel {self.channel!r} within {self.timeout:g} s")
        self.defer(
            trigger=ChannelTrigger(
                channel=self.channel,
                delay_conn_id=self.delay_conn_id,
                filter=self.filter,
                look_ahead=self.look_ahead,
                give_up_at=give_up_at.isoformat(),
            ),
            method_name="execute_complete",
            timeout=remaining,
        )


def take_seen(broker: Broker, channel: str, message_id: str, passes: Filter, *, look_ahead: int) -> Message | None:
    """Take the message with this id, or another one that passes, and give the others back untouched.

    The triggerer's consumer holds the messages before it and hands this one over as soon as somebody receives, so it
    comes first as a rule. Where that consumer has ended, all are in the channel again, and more are looked at.
    """
    others: list[Delivery] = []
    chosen = taken = None
    try:
        while chosen is None and len(others) < look_ahead:
            # A few at first: where returns are counted, each message that is not the one costs it a delivery.
            limit = min(1 if not others else LOOK_FURTHER, look_ahead - len(others))
            received = broker.receive(channel, limit=limit, wait=HAND_OVER)
            if not received:
                break
            others += received
            chosen = next((item for item in received if item.message.id == message_id), None) or next(
                (item for item in received if passes(item.message)), None
            )
        taken = _acknowledge(broker, chosen, others)
    finally:
        _give_back(broker, others, taken=taken)
    return taken


def take_first(broker: Broker, channel: str, passes: Filter, *, look_ahead: int) -> Message | None:
    """Receive up to ``look_ahead`` messages, keep the first that passes, and give the others back untouched."""
    others = list(broker.receive(channel, limit=look_ahead))
    taken = None
    try:
        taken = _acknowledge(broker, next((item for item in others if passes(item.message)), None), others)
    finally:
        _give_back(broker, others, taken=taken)
    return taken


def _acknowledge(broker: Broker, chosen: Delivery | None, received: list[Delivery]) -> Message | None:
    """Acknowledge the chosen one and remove it from what was received."""
    if chosen is None:
        return None
    broker.ack([chosen])
    received.remove(chosen)
    return chosen.message


def _give_back(broker: Broker, others: Sequence[Delivery], *, taken: Message | None) -> None:
    """Give messages back. A task that has taken one goes on if that fails, since it would lose that one."""
    try:
        if others:
            broker.release(others)
    except DelayError as error:
        if taken is None:
            raise
        log.warning("Took %s; the broker hands %d others out again later: %s", taken.id, len(others), error)


def _as_dict(message: Message) -> dict[str, Any]:
    payload = decode_payload(message.payload, message.content_type)
    is_binary = isinstance(payload, bytes)
    return {
        "id": message.id,
        "channel": message.channel,
        # An XCom cannot hold bytes.
        "payload": b64encode(payload).decode() if is_binary else payload,
        "payload_is_base64": is_binary,
        "key": message.key,
        "headers": dict(message.headers),
        "content_type": message.content_type,
        "deliver_at": message.deliver_at.isoformat(),
        "handled_count": message.handled_count,
    }
