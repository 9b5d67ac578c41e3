"""Sensors that wait for messages."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator, PokeReturnValue
from airflow.sdk.exceptions import AirflowSensorTimeout

from airflow_delay_provider.domain.journal import FROM_THE_START
from airflow_delay_provider.domain.message import Delivery, Message, decode_payload
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.hooks.failures import failing_at_once
from airflow_delay_provider.hooks.message_ids import parse_message_ids
from airflow_delay_provider.triggers.channel import load_filter
from airflow_delay_provider.triggers.message import ChannelTrigger, MessageDispatchedTrigger
from airflow_delay_provider.triggers.outcomes import describe_outcomes, require_dispatched

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delay_provider.brokers.base import Broker
    from airflow_delay_provider.triggers.channel import Filter


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
        require_dispatched(describe_outcomes(list(ended), ended))
        return len(ended) == len(ids)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> None:  # noqa: ARG002 - Airflow's signature
        """Succeed when all messages were dispatched."""
        require_dispatched(event)
        self.log.info("All %d messages were dispatched", sum(event["counts"].values()))


class MessageSensor(BaseSensorOperator):
    """Wait for a message in a channel, take it and return it.

    Returns a dict: id, channel, payload (decoded; binary content as base64 text, with payload_is_base64 true), key,
    headers, content_type, deliver_at, handled_count. The message leaves the channel just before the task succeeds;
    others that were looked at stay in place, in order.

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
        return self._take_or_defer(context, give_up_at=datetime.now(UTC) + timedelta(seconds=self.timeout))

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Take the message that was seen, or wait on when somebody else was faster."""
        return self._take_or_defer(context, give_up_at=datetime.fromisoformat(event["give_up_at"]))

    def poke(self, context: Context) -> PokeReturnValue:  # noqa: ARG002 - Airflow's signature
        """Take the first message that passes the filter, if there is one."""
        with failing_at_once(), closing(DelayHook(self.delay_conn_id)) as hook:
            message = take_first(hook.get_conn(), self.channel, load_filter(self.filter), look_ahead=self.look_ahead)
        if message is None:
            return PokeReturnValue(is_done=False)
        self.log.info("Took message %s from channel %s", message.id, message.channel)
        return PokeReturnValue(is_done=True, xcom_value=_as_dict(message))

    def _take_or_defer(self, context: Context, *, give_up_at: datetime) -> Any:
        answer = self.poke(context)
        if answer.is_done:
            return answer.xcom_value
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


def take_first(broker: Broker, channel: str, passes: Filter, *, look_ahead: int) -> Message | None:
    """Receive up to ``look_ahead`` messages, keep the first that passes, and give the others back untouched."""
    received = broker.receive(channel, limit=look_ahead)
    others: list[Delivery] = list(received)
    try:
        chosen = next((item for item in received if passes(item.message)), None)
        if chosen is not None:
            broker.ack([chosen])
            others.remove(chosen)
    finally:
        if others:
            broker.release(others)
    return None if chosen is None else chosen.message


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
