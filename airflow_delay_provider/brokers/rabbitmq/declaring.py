"""The ladder on the broker: created, checked and taken away again."""

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
from airflow_delay_provider.brokers.rabbitmq.topology import JOURNAL, UNROUTABLE, Exchange, Queue, Topology, is_exchange
from airflow_delay_provider.exceptions import MessagesWaitError, UnknownChannelError

if TYPE_CHECKING:
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
        has_journal = topology.journal and _exists(session, Queue(name=JOURNAL))
        for queue in topology.queues():
            # Other ladders write to the same journal, whatever age it was given.
            if queue.name != JOURNAL or not has_journal:
                channel.tell("queue_declare", **_queue_arguments(queue))
        for binding in topology.bindings():
            method = "exchange_bind" if binding.to_exchange else "queue_bind"
            source = "source" if binding.to_exchange else "exchange"
            target = "destination" if binding.to_exchange else "queue"
            channel.tell(method, **{target: binding.destination, source: binding.source, "routing_key": binding.key})
        if topology.journal and not has_journal:
            # So that nobody finds it empty: the position of its last record is where readers begin.
            channel.tell("basic_publish", exchange=JOURNAL, routing_key="", body=b"")
        if is_new:
            _settle(channel)
        _declare_exchange(channel, Exchange(name=topology.ready, kind="fanout"))


def is_declared(session: Session, topology: Topology) -> bool:
    """Whether the ladder was created; one look."""
    return _exists(session, Exchange(name=topology.ready, kind="fanout"))


def is_begun(session: Session, topology: Topology) -> bool:
    """Whether anything of the ladder is there; its exit comes first."""
    return is_declared(session, topology) or _exists(session, Exchange(name=topology.exit, kind="topic"))


def bind_channel(session: Session, topology: Topology, channel: str) -> None:
    """Make sure that a channel exists and that the ladder leads to it.

    A user who may not bind relies on somebody who has: then it is enough that the queue is there, and what has no route
    after all goes to the unroutable queue.
    """
    try:
        with calls(session) as amqp:
            queue = channel
            if is_exchange(channel):
                amqp.ask("exchange_declare", exchange=channel.partition(":")[0], passive=True)
                relay = topology.relay_queue(channel)
                _declare_lasting_queue(session, amqp, relay)
                queue = relay.name
            amqp.ask("queue_bind", queue=queue, exchange=topology.exit, routing_key=topology.exit_key(channel))
    except Exception as error:
        cause = error.__cause__
        if cause is not None and reply_code(cause) == NOT_FOUND:
            raise UnknownChannelError(*_missing(session, channel)) from error
        if isinstance(error, PermissionDeniedError):
            _require_bound_by_others(session, topology, channel, error)
        else:
            raise


def declare_queue(session: Session, topology: Topology, name: str) -> None:
    """Create a durable queue of the ladder's type, for channels that are this package's own."""
    with calls(session) as amqp:
        queue = Queue(name=name, arguments={"x-queue-type": topology.queue_type.value})
        _declare_lasting_queue(session, amqp, queue)


def message_count(session: Session, queue: str) -> int:
    """Return how many messages of a queue could be handed out now; refuse a queue that does not exist."""
    channel = session.open_channel()
    try:
        answer = channel.ask("queue_declare", queue=queue, passive=True)
    except pika_errors.ChannelClosed as error:
        if reply_code(error) == NOT_FOUND:
            raise UnknownChannelError(*_missing(session, queue)) from error
        raise translate(error, session.config) from error
    finally:
        channel.close()
    count: int = answer.method.message_count
    return count


def delete(session: Session, topology: Topology, *, even_if_messages_wait: bool = False) -> None:
    """Take a ladder away; the journal and the unroutable queue, which ladders share, stay.

    The way in is closed first, so that nothing enters a ladder that is being taken down.
    """
    waiting = {rung.name: n for rung in topology.rungs() if (n := _count_if_there(session, rung.name))}
    if waiting and not even_if_messages_wait:
        raise MessagesWaitError(
            f"{sum(waiting.values())} messages wait in {len(waiting)} queues of {topology.prefix} and would be lost;"
            " wait until they are delivered, or add --force to lose them"
        )
    with calls(session) as channel:
        for exchange in (Exchange(name=topology.ready, kind="fanout"), *reversed(list(topology.exchanges()))):
            if exchange.name not in (UNROUTABLE, JOURNAL):
                channel.tell("exchange_delete", exchange=exchange.name)
        for queue in topology.queues():
            if queue.name not in (UNROUTABLE, JOURNAL):
                channel.ask("queue_delete", queue=queue.name)


def find_wrong(session: Session, topology: Topology) -> Iterator[Finding]:
    """Say what of a ladder is missing or has other arguments than it should, changing nothing."""
    ready = Exchange(name=topology.ready, kind="fanout")
    things: list[Exchange | Queue] = [*topology.exchanges(), *topology.queues(), ready]
    unchecked = 0
    for thing in things:
        name = f"{'exchange' if isinstance(thing, Exchange) else 'queue'} {thing.name}"
        if not _exists(session, thing):
            yield Finding(text=f"{name} is missing; run `airflow delay topology create`")
            continue
        try:
            text = _difference(session, thing)
        except PermissionDeniedError:
            unchecked += 1
            continue
        if text is not None and thing.name == JOURNAL:
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


def _exists(session: Session, thing: Exchange | Queue) -> bool:
    channel = session.open_channel()
    try:
        if isinstance(thing, Exchange):
            channel.ask("exchange_declare", exchange=thing.name, passive=True)
        else:
            channel.ask("queue_declare", queue=thing.name, passive=True)
    except pika_errors.ChannelClosed as error:
        if reply_code(error) == NOT_FOUND:
            return False
        raise translate(error, session.config) from error
    finally:
        channel.close()
    return True


def _count_if_there(session: Session, queue: str) -> int:
    try:
        return message_count(session, queue)
    except UnknownChannelError:
        return 0


def _require_bound_by_others(
    session: Session, topology: Topology, channel: str, refusal: PermissionDeniedError
) -> None:
    queue = topology.relay(channel) if is_exchange(channel) else channel
    if not _exists(session, Queue(name=queue)):
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
    is_new = not _exists(session, queue)
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


def _queue_arguments(queue: Queue) -> dict[str, Any]:
    return {"queue": queue.name, "durable": True, "arguments": dict(queue.arguments)}
