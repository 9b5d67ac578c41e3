"""A ladder taken away, and not while a message is in it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from airflow_delay_provider.brokers.rabbitmq import declaring
from airflow_delay_provider.brokers.rabbitmq.management import list_queues
from airflow_delay_provider.brokers.rabbitmq.relays import TOTALS_LAG
from airflow_delay_provider.brokers.rabbitmq.topology import Topology
from airflow_delay_provider.exceptions import MessagesWaitError, UnknownChannelError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.session import Session

#: How often the queues of a closed ladder are looked at.
LOOK_SECONDS = 0.5


def delete(session: Session, topology: Topology, *, even_if_messages_wait: bool = False) -> None:
    """Take a ladder away; the journal and the parking, which ladders share, stay, and so do relays.

    No message is lost unless that is asked for. A quorum queue does not tell how many messages it is passing on, so
    the way in is closed first, and the queues are deleted once a count that is newer than that finds them empty. A
    ladder in which a message is found is opened again.
    """
    rungs = [rung.name for rung in topology.rungs() if declaring.exists(session, rung)]
    if rungs and not even_if_messages_wait:
        _refuse(topology, _count(session, topology))
        _require_countable(session, topology)
        _close(session, topology)
        try:
            _require_empty_for_long_enough(session, topology)
        except BaseException:
            declaring.declare(session, topology)
            raise
    _close(session, topology)
    with declaring.calls(session) as channel:
        for exchange in reversed(list(topology.exchanges())):
            if exchange.name not in topology.shared:
                channel.tell("exchange_delete", exchange=exchange.name)
        for queue in topology.queues():
            if queue.name not in topology.shared:
                channel.ask("queue_delete", queue=queue.name)


def _close(session: Session, topology: Topology) -> None:
    entries = [topology.entry(hold_ms) for hold_ms in (*topology.ladder.holds_ms, None)]
    with declaring.calls(session) as channel:
        for name in (topology.ready, *entries):
            channel.tell("exchange_delete", exchange=name)
        # Answered when all that was told before is done.
        channel.ask("basic_qos", prefetch_count=0)


def _require_countable(session: Session, topology: Topology) -> None:
    if session.config.management_url is None:
        raise MessagesWaitError(
            f"{topology.prefix}: no message waits, but without management_url it cannot be seen whether the broker is"
            " just passing some on, which would be lost; set management_url in the connection's extra, or add --force"
            " if you know that there are none"
        )


def _require_empty_for_long_enough(session: Session, topology: Topology) -> None:
    deadline = time.monotonic() + TOTALS_LAG.total_seconds()
    while True:
        is_late_enough = time.monotonic() >= deadline
        _refuse(topology, _count(session, topology))
        if is_late_enough:
            return
        time.sleep(LOOK_SECONDS)


def _refuse(topology: Topology, waiting: Mapping[str, int]) -> None:
    if waiting:
        raise MessagesWaitError(
            f"{sum(waiting.values())} messages wait in {len(waiting)} queues of {topology.prefix} and would be lost;"
            " wait until they are delivered, or add --force to lose them"
        )


def _count(session: Session, topology: Topology) -> dict[str, int]:
    """How many messages each queue of the ladder has, also those that it is passing on, as far as that is told."""
    counts: dict[str, int] = {}
    if session.config.management_url is not None:
        own = tuple(f"{topology.prefix}.{part}." for part in ("rung", "relay"))
        counts = {
            queue["name"]: n
            for queue in list_queues(session.config)
            if queue["name"].startswith(own) and (n := queue.get("messages", 0))
        }
    for rung in topology.rungs():
        try:
            ready = declaring.message_count(session, rung.name)
        except UnknownChannelError:
            continue
        if ready:
            counts[rung.name] = max(ready, counts.get(rung.name, 0))
    return counts
