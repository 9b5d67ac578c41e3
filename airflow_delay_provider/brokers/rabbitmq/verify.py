"""Checking a ladder on a broker: missing objects, harmful policies, stuck queues, and the broker's retry setting.

The setting ``dead_letter_worker_publisher_confirm_timeout`` cannot be read, neither by AMQP nor by the management API.
So it is measured: a message without a route is dead-lettered, the route is added, and the time until the message
arrives is taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pika import BasicProperties

from airflow_delay_provider.brokers.port import TopologyIssue
from airflow_delay_provider.brokers.rabbitmq import admin
from airflow_delay_provider.brokers.rabbitmq.errors import PermissionDeniedError
from airflow_delay_provider.brokers.rabbitmq.management import (
    applied_policy,
    count_forwarding,
    count_in_relays,
    list_all,
)
from airflow_delay_provider.brokers.rabbitmq.topology import AT_LEAST_ONCE, Exchange, Queue, Topology
from airflow_delay_provider.domain.exceptions import BrokerError, UnknownChannelError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.connection import AmqpChannel, AmqpConnection

#: Settings of a policy that harm the queues of a ladder: messages would be early, lost, or routed elsewhere.
_HARMFUL = {
    "message-ttl",
    "expires",
    "max-length",
    "max-length-bytes",
    "overflow",
    "dead-letter-exchange",
    "dead-letter-routing-key",
    "dead-letter-strategy",
}
#: How often, and how many seconds apart, to look again at queues with expired messages; the broker counts every 5 s.
_MORE_LOOKS, _LOOK_SECONDS = 2, 5.5
#: The longest acceptable retry time; the broker's default is 180 s.
LONGEST_RETRY_SECONDS = 15.0
#: How long a busy broker may take to forward a message that has a route.
_ROUTED_SECONDS = 30.0
_PROBE_LOOK_SECONDS = 0.1
#: The broker deletes the probe's queue by itself if the client dies.
_PROBE_EXPIRES_MS = 120_000


def verify(connection: AmqpConnection, topology: Topology) -> Iterator[TopologyIssue]:
    """Report what is wrong or needs attention; the ladder is not changed."""
    if admin.is_partly_declared(connection, topology) is False:
        yield TopologyIssue(text=f"the ladder {topology.prefix} does not exist; run `airflow delay topology create`")
        return
    yield from _find_wrong_objects(connection, topology)
    yield from _find_parked(connection, topology)
    if connection.config.management_url is None:
        yield _advice(
            "bindings, policies and stuck queues were not checked; set management_url in the connection's extra"
        )
        if topology.journal:
            yield TopologyIssue(
                text="without management_url, messages are reported as dispatched even if a full queue, or an exchange"
                " that routes nowhere, has not taken them; set management_url in the connection's extra"
            )
    else:
        yield from _find_harmful_policies(connection, topology)
        yield from _find_missing_bindings(connection, topology)
        yield from _find_stuck(connection, topology)
        yield from _find_refused(connection)
    yield from find_late_retry(connection)


def _advice(text: str) -> TopologyIssue:
    return TopologyIssue(text=text, is_problem=False)


def _find_wrong_objects(connection: AmqpConnection, topology: Topology) -> Iterator[TopologyIssue]:
    """Find exchanges and queues that are missing or have wrong arguments."""
    ready = Exchange(name=topology.ready, kind="fanout")
    things: list[Exchange | Queue] = [*topology.exchanges(), *topology.queues(), ready]
    unchecked = 0
    for thing in things:
        name = f"{'exchange' if isinstance(thing, Exchange) else 'queue'} {thing.name}"
        if admin.exists(connection, thing) is False:
            yield TopologyIssue(text=f"{name} is missing; run `airflow delay topology create`")
            continue
        try:
            difference = admin.find_difference(connection, thing)
        except PermissionDeniedError:
            unchecked += 1
            continue
        if difference is not None and thing.name == topology.journal_name:
            yield _advice(f"{name} keeps its records for another time ({difference})")
        elif difference is not None:
            yield TopologyIssue(
                text=f"{name} has other arguments ({difference}); delete it once it is empty, then run"
                " `airflow delay topology create`"
            )
    if unchecked:
        yield _advice(
            f"the arguments of {unchecked} exchanges and queues were not checked, because user"
            f" {connection.config.login!r} may not configure them; verify as an administrator"
        )


def _find_parked(connection: AmqpConnection, topology: Topology) -> Iterator[TopologyIssue]:
    try:
        parked = admin.message_count(connection, topology.unroutable)
    except UnknownChannelError:
        return
    except PermissionDeniedError:
        yield _advice(
            f"parked messages were not counted, because user {connection.config.login!r} may not see their queue"
        )
        return
    if parked:
        yield TopologyIssue(
            text=f"{parked} messages had no route and are parked in queue {topology.unroutable}; create their channels"
            " again, then run `airflow delay topology replay-parked`"
        )


# -- with the management API ---------------------------------------------------------------------------------------


def _find_harmful_policies(connection: AmqpConnection, topology: Topology) -> Iterator[TopologyIssue]:
    kinds = [list_all(connection.config, kind) for kind in ("policies", "operator-policies")]
    for queue in topology.queues():
        kind = queue.arguments["x-queue-type"]
        set_by_policies = {name for policies in kinds for name in applied_policy(policies, queue.name, kind)}
        if queue.name != topology.journal_name and (wrong := sorted(_HARMFUL & set_by_policies)):
            yield TopologyIssue(
                text=f"a policy sets {', '.join(wrong)} on queue {queue.name}, so messages may be early or lost;"
                f" exclude names that begin with {topology.root} from the policy's pattern"
            )


def _find_missing_bindings(connection: AmqpConnection, topology: Topology) -> Iterator[TopologyIssue]:
    there = {
        (each["source"], each["destination"], each["routing_key"], each["destination_type"] == "exchange")
        for each in list_all(connection.config, "bindings")
    }
    for each in topology.bindings():
        if (each.source, each.destination, each.key, each.to_exchange) not in there:
            yield TopologyIssue(
                text=f"{each.source} is not bound to {each.destination} by {each.key!r};"
                " run `airflow delay topology create`"
            )


def _find_stuck(connection: AmqpConnection, topology: Topology) -> Iterator[TopologyIssue]:
    """Find queues whose expired messages are not forwarded; look again only if there are such messages."""
    stuck = _count_expired(connection, topology)
    for _ in range(_MORE_LOOKS):
        if not stuck:
            return
        time.sleep(_LOOK_SECONDS)
        now = _count_expired(connection, topology)
        stuck = {queue: now[queue] for queue, before in stuck.items() if now.get(queue, 0) >= before}
    for queue, count in stuck.items():
        yield TopologyIssue(
            text=f"queue {queue} is stuck: it has {count} expired messages and forwards none; run"
            " `airflow delay topology create`, and if that does not help, restart the broker or move the queue's leader"
        )


def _count_expired(connection: AmqpConnection, topology: Topology) -> dict[str, int]:
    """Count by queue; relays are left out, because messages that their channels refuse stay there."""
    names = f"{topology.prefix}."
    return {
        queue: count
        for queue, count in count_forwarding(connection.config).items()
        if queue.startswith(names) and not queue.startswith(topology.relay(""))
    }


def _find_refused(connection: AmqpConnection) -> Iterator[TopologyIssue]:
    for channel, count in sorted(count_in_relays(connection.config).items()):
        yield TopologyIssue(
            text=f"{count} messages are in the relay of channel {channel}; if they stay there, the channel refuses"
            " them: it is full, or routes nowhere; make room or add a binding, then the broker sends them by itself"
        )


# -- the retry setting ---------------------------------------------------------------------------------------------


def find_late_retry(connection: AmqpConnection) -> Iterator[TopologyIssue]:
    """Measure how soon the broker retries messages that it could not forward while it started."""
    try:
        if retries_soon(connection):
            return
    except PermissionDeniedError as refusal:
        yield _advice(
            f"how late messages are after a restart of the broker was not measured ({refusal}); verify as an"
            f" administrator of names that begin with {connection.config.topology.root}"
        )
        return
    yield TopologyIssue(
        text="after a restart of the broker, messages may be minutes late: it retries messages that it could not"
        f" forward while it started after more than {LONGEST_RETRY_SECONDS:g} s (180 s by default); set {{rabbit,"
        " [{dead_letter_worker_publisher_confirm_timeout, 5000}]} in its advanced.config, on every node, and restart it"
    )


def retries_soon(connection: AmqpConnection) -> bool:
    """Whether a message without a route is dead-lettered again within ``LONGEST_RETRY_SECONDS``.

    Nothing stays behind: the target and its exchange end with the connection at the latest, the source and its exchange
    expire. Raises ``PermissionDeniedError`` if the user lacks a permission.
    """
    names = _ProbeNames(f"{connection.config.topology.root}.probe.{uuid4().hex}")
    try:
        with connection.channel() as channel:
            _declare_probe(channel, names)
            # A queue dead-letters in order: when the second message has arrived, the first was tried in vain.
            for key in (names.late, names.routed):
                channel.send(
                    "basic_publish",
                    exchange=names.ingress,
                    routing_key=key,
                    body=b"",
                    properties=BasicProperties(delivery_mode=2),
                )
            if not _has_arrived(connection, names, count=1, seconds=_ROUTED_SECONDS):
                raise BrokerError(f"{connection.config.name}: does not dead-letter; check that it is healthy")
            channel.call("queue_bind", queue=names.target, exchange=names.onward, routing_key=names.late)
        return _has_arrived(connection, names, count=2, seconds=LONGEST_RETRY_SECONDS)
    finally:
        for queue in (names.source, names.target):
            with suppress(BrokerError), connection.channel() as channel:
                channel.call("queue_delete", queue=queue)


class _ProbeNames:
    """The objects of one probe."""

    late, routed = "late", "routed"

    def __init__(self, prefix: str) -> None:
        self.ingress, self.source = f"{prefix}.ingress", f"{prefix}.source"
        self.onward, self.target = f"{prefix}.onward", f"{prefix}.target"


def _declare_probe(channel: AmqpChannel, names: _ProbeNames) -> None:
    # Such an exchange is deleted with the last queue that was bound to it.
    passing: dict[str, Any] = {"durable": False, "auto_delete": True}
    channel.call("exchange_declare", exchange=names.onward, exchange_type="direct", **passing)
    channel.call("queue_declare", queue=names.target, exclusive=True)
    channel.call("queue_bind", queue=names.target, exchange=names.onward, routing_key=names.routed)
    channel.call("exchange_declare", exchange=names.ingress, exchange_type="fanout", **passing)
    onward = {"x-message-ttl": 0, "x-dead-letter-exchange": names.onward, "x-expires": _PROBE_EXPIRES_MS}
    channel.call("queue_declare", queue=names.source, durable=True, arguments={**AT_LEAST_ONCE, **onward})
    channel.call("queue_bind", queue=names.source, exchange=names.ingress)


def _has_arrived(connection: AmqpConnection, names: _ProbeNames, *, count: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while admin.message_count(connection, names.target) < count:
        if time.monotonic() > deadline:
            return False
        time.sleep(_PROBE_LOOK_SECONDS)
    return True
