"""Sensors that wait for messages."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator, PokeReturnValue
from airflow.sdk.exceptions import AirflowSensorTimeout

from airflow_delay_provider.domain.exceptions import ConfigurationError, DelayError, InvalidMessageError
from airflow_delay_provider.domain.lifecycle import FROM_THE_START
from airflow_delay_provider.domain.message import Delivery, Message, decode_payload
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.delay import DelayHook, find_dispatcher_warning
from airflow_delay_provider.hooks.task import open_hook, parse_message_ids
from airflow_delay_provider.triggers.channel_watch import load_filter
from airflow_delay_provider.triggers.message import (
    ChannelTrigger,
    MessageDispatchedTrigger,
    describe_outcomes,
    require_dispatched,
)

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delay_provider.brokers.port import Broker
    from airflow_delay_provider.triggers.channel_watch import Filter

log = logging.getLogger(__name__)

#: How long the triggerer's consumer may take to hand over a message.
HAND_OVER = timedelta(seconds=5)
#: Messages in one receive after the first message did not match.
LOOK_FURTHER = 10


class MessageDispatchedSensor(BaseSensorOperator):
    """Wait until messages are dispatched. A cancelled or dead-lettered message fails the task at once.

    :param message_ids: an id, a list of ids, or the output of the task that scheduled them (templated).
    :param delay_conn_id: connection of the broker.
    :param hold: ``broker`` or ``ledger``, the same as when you scheduled the messages.
    :param deferrable: wait in the triggerer, without a worker slot.
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
        """Return whether all messages were dispatched; raise if one of them never will be."""
        with open_hook(self.delay_conn_id, hold=self.hold) as hook:
            ids = parse_message_ids(self.message_ids)
            outcomes = hook.get_conn().find_outcomes(ids, since=FROM_THE_START) if ids else {}
            if len(outcomes) < len(ids):
                self._warn_once(hook)
        require_dispatched(describe_outcomes(list(outcomes), outcomes))
        return len(outcomes) == len(ids)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> None:  # noqa: ARG002 - Airflow's signature
        """Succeed if all messages were dispatched."""
        require_dispatched(event)
        self.log.info("All %d messages were dispatched", sum(event["counts"].values()))

    def _warn_once(self, hook: DelayHook) -> None:
        warning = None if self._has_warned else find_dispatcher_warning(hook)
        if warning is not None:
            self.log.warning("Nothing dispatches the messages that this task waits for: %s", warning)
            self._has_warned = True


class MessageSensor(BaseSensorOperator):
    """Wait for a message in a channel, take it and return it as a dict.

    :param channel: queue, topic or embedded channel (templated).
    :param filter: dotted path of a function that gets a ``Message`` and returns whether to take it. It also runs in the
        triggerer, so put it in a module that is installed there, not in the DAG file.
    :param look_ahead: number of messages at the head of the channel that the filter sees.
    :param delay_conn_id: connection of the broker.
    :param deferrable: wait in the triggerer, without a worker slot.

    The dict has id, channel, payload, key, headers, content_type, deliver_at and handled_count. The payload is decoded;
    binary payloads are base64 text, and payload_is_base64 is true. The message leaves the channel just before the task
    succeeds. Other messages stay in the channel, in order; docs/sensors.md says how many the sensor may hold meanwhile,
    and for how long.
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
        if callable(filter):
            raise InvalidMessageError(
                "filter",
                "a function cannot be stored for the triggerer",
                'put it into a module that is installed there, and give its dotted path, such as "orders.is_paid"',
            )
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
        """Take the message that the trigger saw, or wait again if another consumer took it."""
        return self._take_or_defer(
            give_up_at=datetime.fromisoformat(event["give_up_at"]), message_id=event["message_id"]
        )

    def poke(self, context: Context) -> PokeReturnValue:  # noqa: ARG002 - Airflow's signature
        """Take the first message that passes the filter, if there is one."""
        message = self._take()
        return PokeReturnValue(is_done=message is not None, xcom_value=None if message is None else _as_dict(message))

    def _take(self, message_id: str | None = None) -> Message | None:
        """Take the message that the trigger saw, or else the first that passes the filter."""
        with open_hook(self.delay_conn_id) as hook:
            passes, broker = load_filter(self.filter), hook.get_conn()
            if message_id is not None:
                message = take_seen(broker, self.channel, message_id, passes, look_ahead=self.look_ahead)
            elif self.filter is None:
                message = take_first(broker, self.channel, passes, look_ahead=1)
            elif not broker.counts_returns():
                message = take_first(broker, self.channel, passes, look_ahead=self.look_ahead)
            elif self.deferrable:
                # Only the triggerer reads: it holds messages as long as a sensor waits.
                message = None
            else:
                raise ConfigurationError(
                    f"{self.delay_conn_id}: this broker counts each look at a message as a delivery, and a queue with a"
                    " delivery limit drops messages that were delivered too often; use deferrable=True, no filter, or"
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
    """Take the message with this id, or another one that passes, and release the others.

    Usually this message comes first: the triggerer's consumer holds the messages before it and hands this one over. If
    that consumer has stopped, all messages are back in the channel, and more of them are received.
    """
    others: list[Delivery] = []
    chosen = taken = None
    try:
        while chosen is None and len(others) < look_ahead:
            # One at first: where returns are counted, each message that does not match loses a delivery.
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
        _release(broker, others, taken=taken)
    return taken


def take_first(broker: Broker, channel: str, passes: Filter, *, look_ahead: int) -> Message | None:
    """Receive up to ``look_ahead`` messages, take the first that passes, and release the others."""
    others = list(broker.receive(channel, limit=look_ahead))
    taken = None
    try:
        taken = _acknowledge(broker, next((item for item in others if passes(item.message)), None), others)
    finally:
        _release(broker, others, taken=taken)
    return taken


def _acknowledge(broker: Broker, chosen: Delivery | None, received: list[Delivery]) -> Message | None:
    """Acknowledge the chosen message and remove it from the received ones."""
    if chosen is None:
        return None
    broker.ack([chosen])
    received.remove(chosen)
    return chosen.message


def _release(broker: Broker, others: Sequence[Delivery], *, taken: Message | None) -> None:
    """Release messages. If that fails, a task that has taken a message goes on, so as not to lose it."""
    try:
        if others:
            broker.release(others)
    except DelayError as error:
        if taken is None:
            raise
        log.warning(
            "Took %s, but cannot release %d others; the broker delivers them again later: %s",
            taken.id,
            len(others),
            error,
        )


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
