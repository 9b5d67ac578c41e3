"""How soon the broker dead-letters again what it could not dead-letter at first, measured on queues made for it.

The setting that rules it (``dead_letter_worker_publisher_confirm_timeout``) cannot be asked for, neither by AMQP nor by
the management API. So a message is dead-lettered that has no route, the route is added, and the clock is looked at.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pika import BasicProperties

from airflow_delay_provider.brokers.rabbitmq import declaring
from airflow_delay_provider.brokers.rabbitmq.topology import AT_LEAST_ONCE
from airflow_delay_provider.exceptions import BrokerError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.session import AmqpChannel, Session

#: The longest that a message may be late because of it; the broker's default is 180 s.
LONGEST_RETRY_SECONDS = 15.0
#: What a busy broker gets to pass on a message that has a route.
_ROUTED_SECONDS = 30.0
_LOOK_SECONDS = 0.1
#: The broker deletes the queue by itself if the client dies and cannot.
_EXPIRES_MS = 120_000


def retries_soon(session: Session) -> bool:
    """Whether a message that had no route is dead-lettered again within ``LONGEST_RETRY_SECONDS``.

    Nothing is left behind: the target and its exchange end with the channel's connection at the latest, the source and
    its exchange expire. A user who lacks a permission for it gets ``PermissionDeniedError``.
    """
    names = _Names(f"{session.config.topology.root}.probe.{uuid4().hex}")
    try:
        with declaring.calls(session) as channel:
            _declare(channel, names)
            # A queue dead-letters in order: once the second message is there, the first was tried in vain.
            for key in (names.late, names.routed):
                channel.tell(
                    "basic_publish",
                    exchange=names.entry,
                    routing_key=key,
                    body=b"",
                    properties=BasicProperties(delivery_mode=2),
                )
            if not _has_come(session, names, count=1, seconds=_ROUTED_SECONDS):
                raise BrokerError(f"{session.config.name}: does not dead-letter; check that it is well")
            channel.ask("queue_bind", queue=names.target, exchange=names.onward, routing_key=names.late)
        return _has_come(session, names, count=2, seconds=LONGEST_RETRY_SECONDS)
    finally:
        _delete(session, names)


class _Names:
    """The objects of one probe, which nobody else uses."""

    late, routed = "late", "routed"

    def __init__(self, prefix: str) -> None:
        self.entry, self.source = f"{prefix}.entry", f"{prefix}.source"
        self.onward, self.target = f"{prefix}.onward", f"{prefix}.target"


def _declare(channel: AmqpChannel, names: _Names) -> None:
    # An exchange of this kind goes with the last queue that was bound to it.
    passing: dict[str, Any] = {"durable": False, "auto_delete": True}
    channel.ask("exchange_declare", exchange=names.onward, exchange_type="direct", **passing)
    channel.ask("queue_declare", queue=names.target, exclusive=True)
    channel.ask("queue_bind", queue=names.target, exchange=names.onward, routing_key=names.routed)
    channel.ask("exchange_declare", exchange=names.entry, exchange_type="fanout", **passing)
    onward = {"x-message-ttl": 0, "x-dead-letter-exchange": names.onward, "x-expires": _EXPIRES_MS}
    channel.ask("queue_declare", queue=names.source, durable=True, arguments={**AT_LEAST_ONCE, **onward})
    channel.ask("queue_bind", queue=names.source, exchange=names.entry)


def _has_come(session: Session, names: _Names, *, count: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while declaring.message_count(session, names.target) < count:
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _delete(session: Session, names: _Names) -> None:
    for queue in (names.source, names.target):
        with suppress(BrokerError), declaring.calls(session) as channel:
            channel.ask("queue_delete", queue=queue)
