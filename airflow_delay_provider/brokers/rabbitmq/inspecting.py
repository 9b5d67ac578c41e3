"""What is wrong, or could go wrong, with a ladder on a broker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from airflow_delay_provider.brokers.base import Finding
from airflow_delay_provider.brokers.rabbitmq import declaring
from airflow_delay_provider.brokers.rabbitmq.management import list_all
from airflow_delay_provider.brokers.rabbitmq.topology import JOURNAL, UNROUTABLE, Queue, QueueType, Topology
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


def verify(session: Session, topology: Topology) -> Iterator[Finding]:
    """Say what is wrong or needs care; nothing is changed."""
    if not declaring.is_begun(session, topology):
        yield Finding(text=f"the ladder {topology.prefix} does not exist; run `airflow delay topology create`")
        return
    yield from declaring.find_wrong(session, topology)
    yield from _find_unroutable(session)
    if session.config.management_url is None:
        yield _advice("bindings and policies were not checked; set management_url in the connection's extra to do so")
    else:
        yield from _find_by_management(session, topology)
    if topology.queue_type is QueueType.CLASSIC:
        yield _advice(
            "queue_type is classic: a broker that dies may lose messages that it is moving at that moment;"
            " quorum keeps them"
        )
    elif session.config.management_url is None:
        yield _advice(
            "messages that are passed on while the broker starts may come up to 180 s late, which is how long it waits"
            " before it tries again; set {rabbit, [{dead_letter_worker_publisher_confirm_timeout, 5000}]} in its"
            " advanced.config to make that 5 s, or management_url in the connection's extra, so that clients wake it"
        )


def _advice(text: str) -> Finding:
    return Finding(text=text, is_problem=False)


def _find_unroutable(session: Session) -> Iterator[Finding]:
    try:
        parked = declaring.message_count(session, UNROUTABLE)
    except UnknownChannelError:
        return
    if parked:
        yield Finding(
            text=f"{parked} messages had no route and are kept in queue {UNROUTABLE}; bind their channels and move them"
        )


def _find_by_management(session: Session, topology: Topology) -> Iterator[Finding]:
    kinds = [list_all(session.config, kind) for kind in ("policies", "operator-policies")]
    for queue in topology.queues():
        set_by_policies = {name for policies in kinds for name in _applied(policies, queue)}
        if queue.name != JOURNAL and (wrong := sorted(_HARMFUL & set_by_policies)):
            yield Finding(
                text=f"a policy sets {', '.join(wrong)} on queue {queue.name}, so messages may come early or be lost;"
                " let the policy's pattern leave out names that begin with delay.v1"
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


def _applied(policies: list[dict[str, Any]], queue: Queue) -> dict[str, Any]:
    """Return what the one policy sets that RabbitMQ applies to a queue: of those that match, the first in priority.

    The server could be asked for it, but leaves it out where its statistics are switched off.
    """
    targets = ("all", "queues", f"{queue.arguments['x-queue-type']}_queues")
    matching = [each for each in policies if each["apply-to"] in targets and re.search(each["pattern"], queue.name)]
    definition: dict[str, Any] = max(matching, key=lambda each: each["priority"])["definition"] if matching else {}
    return definition
