"""The ladder on the broker: created and checked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pika import exceptions as pika_errors

from airflow_delay_provider.brokers.base import Finding
from airflow_delay_provider.brokers.rabbitmq.errors import (
    NOT_FOUND,
    PRECONDITION_FAILED,
    PermissionDeniedError,
    reply_code,
    translate,
)
from airflow_delay_provider.brokers.rabbitmq.topology import Binding, Exchange, Queue, Topology, is_exchange
from airflow_delay_provider.exceptions import UnknownChannelError

if TYPE_CHECKING:
    from pika import spec

    from airflow_delay_provider.brokers.rabbitmq.session import AmqpChannel, Session

#: How long the broker may keep in memory alone that a quorum queue exists; measured: 0.8 to 1 s.
SETTLE_SECONDS = 2.0


@contextmanager
def calls(session: Session) -> Iterator[AmqpChannel]:
    """A channel for a few calls, whose errors are told in this package's words."""
    channel = session.open_channel()
    try:
        yield channel
    except pika_errors.AMQPError as error:
        raise translate(error, session.config) from error
    finally:
        channel.close()


def declare(session: Session, topology: Topology) -> None:
    """Create what is missing of a ladder; what exists with other arguments is refused.

    Hundreds of calls are made without waiting for an answer to each; the last one is answered when all are done, or
    with what the broker refused. A ladder is ready once its queues outlive a killed broker.
    """
    with calls(session) as channel:
        is_new = not is_declared(session, topology)
        for exchange in topology.exchanges():
            channel.tell("exchange_declare", **_exchange_arguments(exchange))
        # Whatever age the journal was given, and however the parking was made.
        kept = [queue.name for queue in topology.queues() if queue.name in topology.shared and exists(session, queue)]
        for queue in topology.queues():
            if queue.name not in kept:
                channel.tell("queue_declare", **_queue_arguments(queue))
        for binding in topology.bindings():
            method, arguments = _binding_call(binding)
            channel.tell(method, **arguments)
        if topology.journal and topology.journal_name not in kept:
            # So that nobody finds it empty: the position of its last record is where readers begin.
            channel.tell("basic_publish", exchange=topology.journal_name, routing_key="", body=b"")
        if is_new:
            _settle(channel)
        _declare_exchange(channel, Exchange(name=topology.ready, kind="fanout"))


def is_declared(session: Session, topology: Topology) -> bool | None:
    """Whether the ladder was created; None for a user who may look at nothing of it, and so could not create it.

    Who may only publish can see the entries. What is published while the rest is being created finds no way, and
    comes back, because the way on is there before the journal's.
    """
    is_ready = exists(session, Exchange(name=topology.ready, kind="fanout"))
    return is_ready if is_ready is not None else exists(session, Exchange(name=topology.entry(None), kind="fanout"))


def is_begun(session: Session, topology: Topology) -> bool | None:
    """Whether anything of the ladder is there; its exit comes first. None for a user who may not look."""
    there = is_declared(session, topology)
    return exists(session, Exchange(name=topology.exit, kind="topic")) if there is False else there


def bind_channel(session: Session, topology: Topology, channel: str) -> None:
    """Make sure that a channel exists and that the ladder leads to it.

    A user who may not bind relies on somebody who has: then it is enough that the queue is there, or that this user may
    not look whether it is, and what has no route after all goes to the unroutable queue.
    """
    try:
        with calls(session) as amqp:
            if is_exchange(channel):
                amqp.ask("exchange_declare", exchange=channel.partition(":")[0], passive=True)
            else:
                amqp.ask("queue_declare", queue=channel, passive=True)
            _declare_lasting_queue(session, amqp, topology.relay_queue(channel))
            for binding in topology.channel_bindings(channel):
                method, arguments = _binding_call(binding)
                amqp.ask(method, **arguments)
    except Exception as error:
        cause = error.__cause__
        if cause is not None and reply_code(cause) == NOT_FOUND:
            raise UnknownChannelError(*_missing(session, channel)) from error
        if isinstance(error, PermissionDeniedError):
            _require_bound_by_others(session, topology, channel, error)
        else:
            raise


def declare_queue(session: Session, name: str) -> None:
    """Create a durable queue, for channels that are this package's own."""
    with calls(session) as amqp:
        _declare_lasting_queue(session, amqp, Queue(name=name, arguments={"x-queue-type": "quorum"}))


def message_count(session: Session, queue: str) -> int:
    """Return how many messages of a queue could be handed out now; refuse a queue that does not exist."""
    count: int = _look_at(session, queue).message_count
    return count


def consumer_count(session: Session, queue: str) -> int:
    """Return how many consumers a queue has; refuse a queue that does not exist."""
    count: int = _look_at(session, queue).consumer_count
    return count


def _look_at(session: Session, queue: str) -> spec.Queue.DeclareOk:
    channel = session.open_channel()
    try:
        answer = channel.ask("queue_declare", queue=queue, passive=True)
    except pika_errors.ChannelClosed as error:
        if reply_code(error) == NOT_FOUND:
            raise UnknownChannelError(*_missing(session, queue)) from error
        raise translate(error, session.config) from error
    finally:
        channel.close()
    found: spec.Queue.DeclareOk = answer.method
    return found


def find_wrong(session: Session, topology: Topology) -> Iterator[Finding]:
    """Say what of a ladder is missing or has other arguments than it should, changing nothing."""
    ready = Exchange(name=topology.ready, kind="fanout")
    things: list[Exchange | Queue] = [*topology.exchanges(), *topology.queues(), ready]
    unchecked = 0
    for thing in things:
        name = f"{'exchange' if isinstance(thing, Exchange) else 'queue'} {thing.name}"
        is_there = exists(session, thing)
        if is_there is False:
            yield Finding(text=f"{name} is missing; run `airflow delay topology create`")
            continue
        try:
            text = _difference(session, thing)
        except PermissionDeniedError:
            unchecked += 1
            continue
        if text is not None and thing.name == topology.journal_name:
            yield Finding(text=f"{name} keeps its records for another time ({text})", is_problem=False)
        elif text is not None:
            yield Finding(text=f"{name} has other arguments ({text}); delete it once it is empty, then create again")
    if unchecked:
        yield Finding(
            text=f"the arguments of {unchecked} exchanges and queues were not checked, because user"
            f" {session.config.login!r} may not configure them; verify as an administrator",
            is_problem=False,
        )


def _difference(session: Session, thing: Exchange | Queue) -> str | None:
    channel = session.open_channel()
    try:
        if isinstance(thing, Exchange):
            _declare_exchange(channel, thing)
        else:
            _declare_queue(channel, thing)
    except pika_errors.ChannelClosed as error:
        if reply_code(error) == PRECONDITION_FAILED:
            return str(error.reply_text)
        raise translate(error, session.config) from error
    finally:
        channel.close()
    return None


def exists(session: Session, thing: Exchange | Queue) -> bool | None:
    """Whether something is there; None where the broker does not say.

    From 4.x on it does not to a user who has no right on a thing of that name, whether it is there or not; some
    releases (4.2.6, 4.3.0) want the right to configure it.
    """
    channel = session.open_channel()
    try:
        if isinstance(thing, Exchange):
            channel.ask("exchange_declare", exchange=thing.name, passive=True)
        else:
            channel.ask("queue_declare", queue=thing.name, passive=True)
    except pika_errors.ChannelClosed as error:
        match reply_code(error):
            case 404:
                return False
            case 403:
                return None
        raise translate(error, session.config) from error
    finally:
        channel.close()
    return True


def _require_bound_by_others(
    session: Session, topology: Topology, channel: str, refusal: PermissionDeniedError
) -> None:
    queue = topology.relay(channel) if is_exchange(channel) else channel
    if exists(session, Queue(name=queue)) is False:
        if is_exchange(channel):
            raise refusal
        raise UnknownChannelError(*_missing(session, channel)) from refusal


def _missing(session: Session, channel: str) -> tuple[str, str, str]:
    exchange, colon, _ = channel.partition(":")
    what = f"exchange {exchange!r}" if colon else f"queue {channel!r}"
    return "channel", f"{what} does not exist on {session.config.name}", "declare it, or correct the name"


def _declare_exchange(channel: AmqpChannel, exchange: Exchange) -> None:
    channel.ask("exchange_declare", **_exchange_arguments(exchange))


def _declare_queue(channel: AmqpChannel, queue: Queue) -> None:
    channel.ask("queue_declare", **_queue_arguments(queue))


def _declare_lasting_queue(session: Session, channel: AmqpChannel, queue: Queue) -> None:
    """Declare a queue and return once it outlives a killed broker, at once if it was there before."""
    is_new = not exists(session, queue)
    _declare_queue(channel, queue)
    if is_new:
        _settle(channel)


def _settle(channel: AmqpChannel) -> None:
    """Wait until the broker has on disk what it was just told to create.

    A broker that is killed sooner comes back with the last quorum queue empty and without a leader (seen on 3.10),
    whatever it had confirmed into it.
    """
    # Answered when all that was told before is done.
    channel.ask("basic_qos", prefetch_count=0)
    time.sleep(SETTLE_SECONDS)


def _exchange_arguments(exchange: Exchange) -> dict[str, Any]:
    return {
        "exchange": exchange.name,
        "exchange_type": exchange.kind,
        "durable": True,
        "arguments": dict(exchange.arguments),
    }


def _binding_call(binding: Binding) -> tuple[str, dict[str, Any]]:
    if binding.to_exchange:
        ends = {"source": binding.source, "destination": binding.destination}
        return "exchange_bind", ends | {"routing_key": binding.key}
    ends = {"exchange": binding.source, "queue": binding.destination}
    return "queue_bind", ends | {"routing_key": binding.key}


def _queue_arguments(queue: Queue) -> dict[str, Any]:
    return {"queue": queue.name, "durable": True, "arguments": dict(queue.arguments)}
