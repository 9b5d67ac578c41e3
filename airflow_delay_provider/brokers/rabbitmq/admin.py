"""Creating, binding, looking up and deleting exchanges and queues."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow_delay_provider.brokers.rabbitmq.errors import (
    ACCESS_REFUSED,
    NOT_FOUND,
    PRECONDITION_FAILED,
    PermissionDeniedError,
    reply_code,
)
from airflow_delay_provider.brokers.rabbitmq.management import TOTALS_LAG, list_queues
from airflow_delay_provider.brokers.rabbitmq.topology import Binding, Exchange, Queue, Topology, is_exchange
from airflow_delay_provider.domain.exceptions import DelayError, MessagesWaitError, UnknownChannelError

if TYPE_CHECKING:
    from pika import spec

    from airflow_delay_provider.brokers.rabbitmq.connection import AmqpChannel, AmqpConnection

#: How long the broker may keep a new quorum queue in memory only; measured: 0.8 to 1 s.
SETTLE_SECONDS = 2.0
#: Between two looks at the queues of a ladder that is about to be deleted.
LOOK_SECONDS = 0.5


# -- ladders -------------------------------------------------------------------------------------------------------


def declare_ladder(connection: AmqpConnection, topology: Topology) -> None:
    """Create what is missing of a ladder; refuse objects that exist with other arguments.

    Hundreds of calls are sent without waiting for each answer. The last one is answered when all are done, or with the
    broker's refusal. A ladder is ready once its queues survive a killed broker.
    """
    with connection.channel() as channel:
        is_new = not is_declared(connection, topology)
        for exchange in topology.exchanges():
            channel.send("exchange_declare", **_exchange_arguments(exchange))
        # Shared queues stay as they are: the journal may have another age, for example.
        kept = [
            queue.name for queue in topology.queues() if queue.name in topology.shared and exists(connection, queue)
        ]
        for queue in topology.queues():
            if queue.name not in kept:
                channel.send("queue_declare", **_queue_arguments(queue))
        for binding in topology.bindings():
            method, arguments = _binding_call(binding)
            channel.send(method, **arguments)
        if topology.journal and topology.journal_name not in kept:
            # The first record: readers begin at the position of the last one.
            channel.send("basic_publish", exchange=topology.journal_name, routing_key="", body=b"")
        if is_new:
            _settle(channel)
        channel.call("exchange_declare", **_exchange_arguments(Exchange(name=topology.ready, kind="fanout")))


def is_declared(connection: AmqpConnection, topology: Topology) -> bool | None:
    """Whether the ladder was created; None for a user who may see nothing of it, and so could not create it.

    A user who may only publish can see the ingress exchanges. A message published while the rest is being created is
    returned as unroutable, because the route to the rung exists before the one to the journal.
    """
    is_ready = exists(connection, Exchange(name=topology.ready, kind="fanout"))
    if is_ready is not None:
        return is_ready
    return exists(connection, Exchange(name=topology.ingress(None), kind="fanout"))


def is_partly_declared(connection: AmqpConnection, topology: Topology) -> bool | None:
    """Whether anything of the ladder exists, its exit first; None for a user who may not see it."""
    is_there = is_declared(connection, topology)
    return exists(connection, Exchange(name=topology.exit, kind="topic")) if is_there is False else is_there


def delete_ladder(connection: AmqpConnection, topology: Topology, *, even_if_messages_wait: bool = False) -> None:
    """Delete a ladder; keep its relays, and the journal and the parked messages, which other ladders share.

    No message is lost unless you ask for it. A quorum queue does not count the messages that it is forwarding, so the
    ingress exchanges are deleted first, and the queues once a count that is newer finds them empty. If a message is
    found after all, the ladder is created again.
    """
    has_rungs = any(exists(connection, rung) for rung in topology.rungs())
    if has_rungs and not even_if_messages_wait:
        _refuse_waiting(topology, _count_waiting(connection, topology))
        if connection.config.management_url is None:
            raise MessagesWaitError(
                f"{topology.prefix}: no message waits, but messages that the broker is just forwarding cannot be"
                " counted without management_url and would be lost; set management_url in the connection's extra, or"
                " add --force if you know that there are none"
            )
        _close_ingress(connection, topology)
        try:
            _require_empty(connection, topology)
        except BaseException:
            declare_ladder(connection, topology)
            raise
    _close_ingress(connection, topology)
    with connection.channel() as channel:
        for exchange in reversed(list(topology.exchanges())):
            if exchange.name not in topology.shared:
                channel.send("exchange_delete", exchange=exchange.name)
        for queue in topology.queues():
            if queue.name not in topology.shared:
                channel.call("queue_delete", queue=queue.name)


def _close_ingress(connection: AmqpConnection, topology: Topology) -> None:
    with connection.channel() as channel:
        for name in (topology.ready, *topology.ingresses()):
            channel.send("exchange_delete", exchange=name)
        _wait_until_done(channel)


def _require_empty(connection: AmqpConnection, topology: Topology) -> None:
    deadline = time.monotonic() + TOTALS_LAG.total_seconds()
    while True:
        is_last = time.monotonic() >= deadline
        _refuse_waiting(topology, _count_waiting(connection, topology))
        if is_last:
            return
        time.sleep(LOOK_SECONDS)


def _refuse_waiting(topology: Topology, waiting: Mapping[str, int]) -> None:
    if waiting:
        raise MessagesWaitError(
            f"{sum(waiting.values())} messages wait in {len(waiting)} queues of {topology.prefix} and would be lost;"
            " wait until they are delivered, or add --force to lose them"
        )


def _count_waiting(connection: AmqpConnection, topology: Topology) -> dict[str, int]:
    """Count the messages of each queue of the ladder; with the management API also those that it is forwarding."""
    counts: dict[str, int] = {}
    if connection.config.management_url is not None:
        own = tuple(f"{topology.prefix}.{part}." for part in ("rung", "relay"))
        counts = {
            queue["name"]: count
            for queue in list_queues(connection.config)
            if queue["name"].startswith(own) and (count := queue.get("messages", 0))
        }
    for rung in topology.rungs():
        try:
            ready = message_count(connection, rung.name)
        except UnknownChannelError:
            continue
        if ready:
            counts[rung.name] = max(ready, counts.get(rung.name, 0))
    return counts


# -- channels ------------------------------------------------------------------------------------------------------


def bind_channel(connection: AmqpConnection, topology: Topology, channel: str) -> None:
    """Make sure that a channel exists and that the ladder leads to it.

    A user who may not bind relies on an administrator. Then it is enough that the queue exists, or that this user may
    not see whether it does; messages without a route are parked.
    """
    try:
        with connection.channel() as amqp:
            if is_exchange(channel):
                amqp.call("exchange_declare", exchange=channel.partition(":")[0], passive=True)
            else:
                amqp.call("queue_declare", queue=channel, passive=True)
            _declare_durably(connection, amqp, topology.relay_queue(channel))
            for binding in topology.channel_bindings(channel):
                method, arguments = _binding_call(binding)
                amqp.call(method, **arguments)
    except DelayError as error:
        if reply_code(error) == NOT_FOUND:
            raise _unknown(connection, channel) from error
        if not isinstance(error, PermissionDeniedError):
            raise
        _require_bound_by_others(connection, topology, channel, error)


def _require_bound_by_others(
    connection: AmqpConnection, topology: Topology, channel: str, refusal: PermissionDeniedError
) -> None:
    queue = topology.relay(channel) if is_exchange(channel) else channel
    if exists(connection, Queue(name=queue)) is False:
        if is_exchange(channel):
            raise refusal
        raise _unknown(connection, channel) from refusal


def declare_queue(connection: AmqpConnection, name: str) -> None:
    """Create a quorum queue for a channel that this package creates by itself."""
    with connection.channel() as amqp:
        _declare_durably(connection, amqp, Queue(name=name, arguments={"x-queue-type": "quorum"}))


def message_count(connection: AmqpConnection, queue: str) -> int:
    """Return how many messages of a queue can be received now; refuse a queue that does not exist."""
    count: int = _inspect(connection, queue).message_count
    return count


def consumer_count(connection: AmqpConnection, queue: str) -> int:
    """Return how many consumers a queue has; refuse a queue that does not exist."""
    count: int = _inspect(connection, queue).consumer_count
    return count


def _inspect(connection: AmqpConnection, queue: str) -> spec.Queue.DeclareOk:
    try:
        with connection.channel() as channel:
            found: spec.Queue.DeclareOk = channel.call("queue_declare", queue=queue, passive=True).method
    except DelayError as error:
        if reply_code(error) == NOT_FOUND:
            raise _unknown(connection, queue) from error
        raise
    return found


def _unknown(connection: AmqpConnection, channel: str) -> UnknownChannelError:
    exchange, colon, _ = channel.partition(":")
    what = f"exchange {exchange!r}" if colon else f"queue {channel!r}"
    return UnknownChannelError(
        "channel", f"{what} does not exist on {connection.config.name}", "declare it, or correct the name"
    )


# -- single objects ------------------------------------------------------------------------------------------------


def exists(connection: AmqpConnection, thing: Exchange | Queue) -> bool | None:
    """Whether an object exists; None where the broker does not say.

    From 4.x on it does not tell a user who has no permission on an object of that name. Some releases (4.2.6, 4.3.0)
    ask for the permission to configure it.
    """
    try:
        with connection.channel() as channel:
            if isinstance(thing, Exchange):
                channel.call("exchange_declare", exchange=thing.name, passive=True)
            else:
                channel.call("queue_declare", queue=thing.name, passive=True)
    except DelayError as error:
        if reply_code(error) in (NOT_FOUND, ACCESS_REFUSED):
            return False if reply_code(error) == NOT_FOUND else None
        raise
    return True


def find_difference(connection: AmqpConnection, thing: Exchange | Queue) -> str | None:
    """Return how the arguments of an existing object differ from what they should be, in the broker's words."""
    try:
        with connection.channel() as channel:
            if isinstance(thing, Exchange):
                channel.call("exchange_declare", **_exchange_arguments(thing))
            else:
                channel.call("queue_declare", **_queue_arguments(thing))
    except DelayError as error:
        if reply_code(error) == PRECONDITION_FAILED:
            return str(getattr(error.__cause__, "reply_text", error))
        raise
    return None


def _declare_durably(connection: AmqpConnection, channel: AmqpChannel, queue: Queue) -> None:
    """Declare a queue and return once it survives a killed broker; at once if it existed before."""
    is_new = not exists(connection, queue)
    channel.call("queue_declare", **_queue_arguments(queue))
    if is_new:
        _settle(channel)


def _settle(channel: AmqpChannel) -> None:
    """Wait until the broker has new queues on disk.

    A broker that is killed sooner comes back with the last quorum queue empty and without a leader (seen on 3.10),
    whatever it had confirmed into it.
    """
    _wait_until_done(channel)
    time.sleep(SETTLE_SECONDS)


def _wait_until_done(channel: AmqpChannel) -> None:
    """Wait for everything that was sent on this channel: the broker answers in order."""
    channel.call("basic_qos", prefetch_count=0)


def _exchange_arguments(exchange: Exchange) -> dict[str, Any]:
    return {
        "exchange": exchange.name,
        "exchange_type": exchange.kind,
        "durable": True,
        "arguments": dict(exchange.arguments),
    }


def _queue_arguments(queue: Queue) -> dict[str, Any]:
    return {"queue": queue.name, "durable": True, "arguments": dict(queue.arguments)}


def _binding_call(binding: Binding) -> tuple[str, dict[str, Any]]:
    if binding.to_exchange:
        ends = {"source": binding.source, "destination": binding.destination}
        return "exchange_bind", ends | {"routing_key": binding.key}
    ends = {"exchange": binding.source, "queue": binding.destination}
    return "queue_bind", ends | {"routing_key": binding.key}
