"""The shared desk at which tickets of Spark retries are shown: go, or come again later."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_delay_provider.exceptions import ConfigurationError
from airflow_delay_provider.hooks.cluster_gate import Answer, ClusterGate
from airflow_delay_provider.hooks.spark_cluster import find_cluster
from airflow_delay_provider.spark.tickets import Ticket, WaitsFor
from airflow_delay_provider.triggers.broker_thread import BrokerThread

if TYPE_CHECKING:
    from airflow_delay_provider.hooks.delay import DelayHook


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a ticket leads: the cluster, and the channel of its tickets."""

    spark_conn_id: str
    #: Dotted path of the user's own check whether the cluster is up.
    check: str | None = None
    channel: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """The ticket to wait for next, and the journal position from before it was scheduled."""

    ticket: Ticket
    since: str


@dataclass(frozen=True, eq=False, slots=True)
class _Shown:
    ticket: Ticket
    place: Place
    #: None is: go.
    answer: asyncio.Future[Extension | None]


class RetryDesk(BrokerThread):
    """Answers all tickets that are shown at about the same time with one look at each cluster and one write."""

    interval = 60.0

    def __init__(self, conn_id: str, loop: asyncio.AbstractEventLoop, *, hold: str | None = None) -> None:
        super().__init__(conn_id, loop, hold=hold)
        self._shown: deque[_Shown] = deque()

    async def show(self, ticket: Ticket, place: Place) -> Extension | None:
        """Return None once the submission may begin at once, else the ticket that brings it later.

        That one is confirmed by the broker, so that it can be seen, expedited and given up like the first.
        """
        shown = _Shown(ticket, place, self.loop.create_future())
        self._shown.append(shown)
        self.look_now()
        try:
            return await shown.answer
        finally:
            # Who was ended meanwhile needs no ticket any more.
            with suppress(ValueError):
                self._shown.remove(shown)

    def look(self, hook: DelayHook) -> bool:
        by_place = defaultdict[Place, list[_Shown]](list)
        for shown in list(self._shown):
            by_place[shown.place].append(shown)
        for place, group in by_place.items():
            self._serve(hook, place, group)
            # Only now: after an error the next look serves them again, with the same ids.
            for shown in group:
                with suppress(ValueError):
                    self._shown.remove(shown)
        return bool(self._shown)

    def fail(self, error: Exception) -> None:
        for shown in self._shown:
            _refuse(shown, error)

    def _serve(self, hook: DelayHook, place: Place, group: Sequence[_Shown]) -> None:
        broker = hook.get_conn()
        try:
            gate = ClusterGate(
                hook.get_ledger(), find_cluster(place.spark_conn_id, check=place.check), clock=broker.clock
            )
            asked = _ask(gate, group)
        except ConfigurationError as error:
            for shown in group:
                self.call_on_loop(_refuse, shown, error)
            return
        now = broker.clock.now()
        # A cluster that is down is down also when the next look has become due meanwhile.
        extended = {
            shown: _extend(shown.ticket, answer) for shown, answer in asked.items() if answer.down or answer.at > now
        }
        since = broker.outcomes_begin()
        if extended:
            broker.schedule([ticket.as_message(place.channel) for ticket in extended.values()])
        for shown in group:
            ticket = extended.get(shown)
            self.call_on_loop(_settle, shown, None if ticket is None else Extension(ticket=ticket, since=since))


def _ask(gate: ClusterGate, group: Sequence[_Shown]) -> dict[_Shown, Answer]:
    """A ticket that waited for its turn has had it, and needs no other."""
    had_turn = [shown for shown in group if shown.ticket.waits_for is WaitsFor.TURN]
    waiting = [shown for shown in group if shown.ticket.waits_for is not WaitsFor.TURN]
    answers = gate.ask(len(group), had_turn=len(had_turn))
    return dict(zip([*had_turn, *waiting], answers, strict=True))


def _extend(ticket: Ticket, answer: Answer) -> Ticket:
    return ticket.extended(answer.at, WaitsFor.CLUSTER if answer.down else WaitsFor.TURN)


def _settle(shown: _Shown, answer: Extension | None) -> None:
    if not shown.answer.done():
        shown.answer.set_result(answer)


def _refuse(shown: _Shown, error: Exception) -> None:
    if not shown.answer.done():
        shown.answer.set_exception(error)
