"""What is wrong, or could go wrong, with a ladder on a broker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from airflow_delay_provider.brokers.base import Finding
from airflow_delay_provider.brokers.rabbitmq import declaring, probe
from airflow_delay_provider.brokers.rabbitmq.errors import PermissionDeniedError
from airflow_delay_provider.brokers.rabbitmq.management import applied, held_messages, list_all
from airflow_delay_provider.brokers.rabbitmq.relays import count_held
from airflow_delay_provider.brokers.rabbitmq.topology import Topology
from airflow_delay_provider.exceptions import UnknownChannelError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.session import Session

#: What a policy must not do to the queues of a ladder: messages would be early, lost, or go elsewhere.
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

#: How often, and how many seconds apart, queues are looked at that hold expired messages; the broker counts every 5 s.
_MORE_LOOKS, _LOOK_SECONDS = 2, 5.5


def verify(session: Session, topology: Topology) -> Iterator[Finding]:
    """Say what is wrong or needs care; no object of the ladder is changed."""
    if declaring.is_begun(session, topology) is False:
        yield Finding(text=f"the ladder {topology.prefix} does not exist; run `airflow delay topology create`")
        return
    yield from declaring.find_wrong(session, topology)
    yield from _find_unroutable(session, topology)
    if session.config.management_url is None:
        yield _advice(
            "bindings, policies and queues that stand still were not checked; set management_url in the connection's"
            " extra to do so"
        )
        if topology.journal:
            yield Finding(
                text="messages are told to be dispatched even if a full queue, or an exchange that routes nowhere, has"
                " not taken them, because that cannot be seen without management_url; set it in the connection's extra"
            )
    else:
        yield from _find_by_management(session, topology)
        yield from _find_standing(session, topology)
        yield from _find_refused(session)
    yield from find_late_retry(session)


def _find_standing(session: Session, topology: Topology) -> Iterator[Finding]:
    """Find queues that hold expired messages and were never seen to pass one on; looks again only if some are held."""
    standing = _held(session, topology)
    for _ in range(_MORE_LOOKS):
        if not standing:
            return
        time.sleep(_LOOK_SECONDS)
        now = _held(session, topology)
        standing = {queue: now[queue] for queue, before in standing.items() if now.get(queue, 0) >= before}
    for queue, held in standing.items():
        yield Finding(
            text=f"queue {queue} stands still: it holds {held} messages that have expired and passes none on; run"
            " `airflow delay topology create`, and if that does not help, restart the broker or move the queue's leader"
        )


def _held(session: Session, topology: Topology) -> dict[str, int]:
    """What queues of the ladder hold; relays are left out, in which messages wait that their channels refuse."""
    names = f"{topology.prefix}."
    return {
        queue: held
        for queue, held in held_messages(session.config).items()
        if queue.startswith(names) and not topology.is_relay(queue)
    }


def find_late_retry(session: Session) -> Iterator[Finding]:
    """Measure how soon the broker tries again what it could not pass on while it started."""
    try:
        if probe.retries_soon(session):
            return
    except PermissionDeniedError as refusal:
        yield _advice(
            f"how late messages come after a restart of the broker was not measured ({refusal}); verify as an"
            f" administrator of names that begin with {session.config.topology.root}"
        )
        return
    yield Finding(
        text="after a restart of the broker messages may come minutes late: what it cannot pass on while it starts, it"
        f" tries again after more than {probe.LONGEST_RETRY_SECONDS:g} s (180 s by default); set {{rabbit,"
        " [{dead_letter_worker_publisher_confirm_timeout, 5000}]} in its advanced.config, on every node, and restart it"
    )


def _advice(text: str) -> Finding:
    return Finding(text=text, is_problem=False)


def _find_unroutable(session: Session, topology: Topology) -> Iterator[Finding]:
    try:
        parked = declaring.message_count(session, topology.unroutable)
    except UnknownChannelError:
        return
    except PermissionDeniedError:
        yield _advice(f"messages that had no route were not counted, because {session.config.login!r} may not look")
        return
    if parked:
        yield Finding(
            text=f"{parked} messages had no route and are kept in queue {topology.unroutable}; create their channels"
            " again, then run `airflow delay topology replay-parked`"
        )


def _find_refused(session: Session) -> Iterator[Finding]:
    for channel, count in sorted(count_held(session.config).items()):
        yield Finding(
            text=f"{count} messages are in the relay of channel {channel}; if they stay there, the channel does not"
            " take them: it is full, or routes nowhere; make room or a binding, and the broker sends them by itself"
        )


def _find_by_management(session: Session, topology: Topology) -> Iterator[Finding]:
    kinds = [list_all(session.config, kind) for kind in ("policies", "operator-policies")]
    for queue in topology.queues():
        kind = queue.arguments["x-queue-type"]
        set_by_policies = {name for policies in kinds for name in applied(policies, queue.name, kind)}
        if queue.name != topology.journal_name and (wrong := sorted(_HARMFUL & set_by_policies)):
            yield Finding(
                text=f"a policy sets {', '.join(wrong)} on queue {queue.name}, so messages may come early or be lost;"
                f" let the policy's pattern leave out names that begin with {topology.root}"
            )
    there = {
        (each["source"], each["destination"], each["routing_key"], each["destination_type"] == "exchange")
        for each in list_all(session.config, "bindings")
    }
    for each in topology.bindings():
        if (each.source, each.destination, each.key, each.to_exchange) not in there:
            yield Finding(
                text=f"{each.source} is not bound to {each.destination} by {each.key!r};"
                " run `airflow delay topology create`"
            )
