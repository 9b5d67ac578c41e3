"""Routes that cancel, reschedule, expedite and replay messages: one, a selection, or all that match a filter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import groupby

from fastapi import APIRouter, Depends, HTTPException, Request

from airflow_delay_provider.api.auth import CurrentPermissions, Permissions, require_custom_header
from airflow_delay_provider.api.ledgers import OpenLedger, find_ledger, open_hook
from airflow_delay_provider.api.messages import criteria_of
from airflow_delay_provider.api.models import (
    MAX_PER_ACTION,
    ActionResult,
    MessageFilter,
    Refusal,
    RescheduleBody,
    Selection,
)
from airflow_delay_provider.api.problems import describes, detail_of, status_of
from airflow_delay_provider.api.representation import CHANGES, ActionName, Presenter
from airflow_delay_provider.brokers.ledger import listing, scheduling, search
from airflow_delay_provider.brokers.ledger.records import MessageRecord
from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.domain.arguments import Hold, resolve_deliver_at
from airflow_delay_provider.domain.clock import ceil_ms
from airflow_delay_provider.domain.dead_letters import DeadLetters
from airflow_delay_provider.domain.exceptions import (
    ConflictError,
    DelayError,
    InvalidMessageError,
    LifecycleError,
    NoRecallError,
)
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import require_message_id

router = APIRouter(prefix="/actions", tags=["actions"], dependencies=[Depends(require_custom_header)])

#: A dry run counts no more messages than are on this many pages.
PAGES_COUNTED = 10
_DONE: dict[ActionName, str] = {
    "cancel": "cancelled",
    "expedite": "expedited",
    "reschedule": "rescheduled",
    "replay": "replayed",
}
_ERRORS = describes(404, 409, 412)


@router.post("/cancel", responses=_ERRORS)
def cancel(request: Request, permissions: CurrentPermissions, body: Selection) -> ActionResult:
    """Cancel scheduled messages."""
    return _Action(request, permissions, body, "cancel").run()


@router.post("/expedite", responses=_ERRORS)
def expedite(request: Request, permissions: CurrentPermissions, body: Selection) -> ActionResult:
    """Deliver scheduled messages now."""
    return _Action(request, permissions, body, "expedite").run()


@router.post("/reschedule", responses=_ERRORS)
def reschedule(request: Request, permissions: CurrentPermissions, body: RescheduleBody) -> ActionResult:
    """Change the delivery time of scheduled messages."""
    return _Action(request, permissions, body, "reschedule").run()


@router.post("/replay", responses=_ERRORS)
def replay(request: Request, permissions: CurrentPermissions, body: Selection) -> ActionResult:
    """Send dead messages to their channels again."""
    return _Action(request, permissions, body, "replay").run()


@dataclass(kw_only=True, slots=True)
class _Chosen:
    """The messages of a request."""

    records: list[MessageRecord] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    matched: int = 0
    next: str | None = None


class _Action:
    """One request."""

    def __init__(self, request: Request, permissions: Permissions, body: Selection, action: ActionName) -> None:
        self._body = body
        self._action = action
        self._user = permissions.user.get_name()
        self._opened: OpenLedger = find_ledger(request, body.conn_id)
        self._presenter = Presenter(request, self._opened, permissions)
        self._deliver_at = self._parse_deliver_at()
        self._due_ms = None if self._deliver_at is None else ceil_ms(self._deliver_at)
        #: A refusal is the answer then; otherwise it is part of the answer.
        self._is_single = body.ids is not None and len(set(body.ids)) == 1
        self._generation = self._parse_generation()
        self._state = State.DEAD if action == "replay" else State.SCHEDULED

    def run(self) -> ActionResult:
        """Choose the messages and change them, or count them."""
        ids, given = self._body.ids, self._body.filter
        if ids is not None and given is None:
            chosen = self._choose_by_id(ids)
        elif given is not None and ids is None:
            chosen = self._choose_by_filter(given)
        else:
            raise InvalidMessageError("ids", "no clear selection", "give either ids or a filter")
        changed = 0 if self._body.dry_run else self._change(chosen)
        return ActionResult(
            action=self._action,
            dry_run=self._body.dry_run,
            matched=chosen.matched,
            is_exact=chosen.next is None,
            changed=changed,
            refused=chosen.refused,
            next=None if self._body.dry_run else chosen.next,
            deliver_at=self._deliver_at,
        )

    def _parse_deliver_at(self) -> datetime | None:
        body = self._body
        if not isinstance(body, RescheduleBody):
            return None
        if body.deliver_at is None and body.deliver_after is None:
            raise InvalidMessageError("deliver_at", "missing", "give deliver_at or deliver_after; or expedite instead")
        if body.deliver_after is not None and body.page is not None:
            raise InvalidMessageError("deliver_after", "is not for further pages", "give deliver_at of the last answer")
        now = self._opened.now()
        due = resolve_deliver_at(
            deliver_at=body.deliver_at, deliver_after=body.deliver_after, on_past=body.on_past, now=now
        )
        self._opened.limits.check_delay(due, now=now)
        return due

    def _parse_generation(self) -> int | None:
        body = self._body
        generation = body.generation if isinstance(body, RescheduleBody) else None
        if generation is not None and not self._is_single:
            raise InvalidMessageError("generation", "is for one message", "give one id, or leave it out")
        return generation

    # -- choosing ------------------------------------------------------------------------------------------------

    def _choose_by_id(self, ids: Sequence[str]) -> _Chosen:
        wanted = [require_message_id(each) for each in dict.fromkeys(ids)]
        with self._opened.ledger.read() as connection:
            found = listing.get_many(connection, wanted)
        chosen = _Chosen()
        for message_id in wanted:
            record = found.get(message_id)
            refusal = self._refuse(message_id, record)
            if refusal is None and record is not None:
                chosen.records.append(record)
            elif refusal is not None:
                if self._is_single:
                    raise HTTPException(refusal.status, refusal.detail)
                chosen.refused.append(refusal)
        chosen.matched = len(chosen.records)
        return chosen

    def _refuse(self, message_id: str, record: MessageRecord | None) -> Refusal | None:
        if record is None or self._opened.destination not in (None, record.destination):
            return Refusal(id=message_id, status=404, detail=f"The ledger has no message {message_id!r}.")
        if not self._presenter.may_edit(record):
            what = "this message" if record.message.origin is None else "task instances of its DAG"
            return Refusal(id=message_id, status=403, detail=f"You may not edit {what}.")
        if record.state is not self._state:
            return Refusal(
                id=message_id,
                status=409,
                detail=f"Message {message_id!r} is {record.state.name} since {record.updated_at:%Y-%m-%d %H:%M:%S} UTC"
                f" and cannot be {_DONE[self._action]}; only a {self._state.name.lower()} message can.",
            )
        if self._generation not in (None, record.generation):
            return Refusal(
                id=message_id,
                status=409,
                detail=f"Message {message_id!r} has been changed since you read it; read it again.",
            )
        return None

    def _choose_by_filter(self, given: MessageFilter) -> _Chosen:
        criteria = criteria_of(self._opened, given, self._state)
        if self._action == "expedite":
            # Messages that are due do not need it, and would be found again on a later page, for ever.
            due_from_ms = max(criteria.due_from_ms or 0, self._opened.now_ms() + 1)
            criteria = replace(criteria, due_from_ms=due_from_ms)
        chosen = _Chosen(next=self._body.page)
        with self._opened.ledger.read() as connection:
            for _ in range(PAGES_COUNTED if self._body.dry_run else 1):
                found = search.search(
                    connection,
                    criteria,
                    token=chosen.next,
                    size=MAX_PER_ACTION,
                    is_visible=self._is_to_change,
                    scanned=search.SCANNED_IN_BULK,
                )
                chosen.matched += len(found.records)
                chosen.next = found.next
                chosen.records += found.records
                if found.next is None:
                    break
        return chosen

    def _is_to_change(self, record: MessageRecord) -> bool:
        # An earlier page may have rescheduled it already.
        return ceil_ms(record.message.deliver_at) != self._due_ms and self._presenter.may_edit(record)

    # -- changing ------------------------------------------------------------------------------------------------

    def _change(self, chosen: _Chosen) -> int:
        """Change the messages, those of each broker together, and return how many were changed."""
        groups = groupby(sorted(chosen.records, key=self._group), key=self._group)
        return sum(self._change_group(*key, [each.message.id for each in same], chosen) for key, same in groups)

    def _group(self, record: MessageRecord) -> tuple[str, bool, str]:
        # Only dead letters are kept by channel.
        channel = record.message.channel if self._action == "replay" else ""
        return record.destination or "", record.held_by_broker, channel

    def _change_group(
        self, destination: str, held_by_broker: bool, channel: str, ids: list[str], chosen: _Chosen
    ) -> int:
        try:
            if self._action == "replay":
                return self._replay(destination, held_by_broker, channel, ids, chosen)
            if not held_by_broker:
                return self._change_each(self._change_in_ledger, ids, chosen)
            with open_hook(destination, hold=Hold.BROKER) as hook:
                return self._change_each(partial(self._change_in_broker, hook.get_conn()), ids, chosen)
        except DelayError as error:
            self._refuse_all(ids, error, chosen)
            return 0

    def _refuse_all(self, ids: Sequence[str], error: DelayError, chosen: _Chosen) -> None:
        if self._is_single:
            raise error
        known = {each.id for each in chosen.refused}
        chosen.refused += [
            Refusal(id=each, status=status_of(error), detail=detail_of(error)) for each in ids if each not in known
        ]

    def _change_in_ledger(self, ids: Sequence[str]) -> None:
        self._opened.ledger.transact(
            scheduling.change_waiting,
            ids,
            CHANGES[self._action],
            now_ms=self._opened.now_ms(),
            deliver_at_ms=self._opened.now_ms() if self._action == "expedite" else self._due_ms,
            generation=self._generation,
            reason=f"requested by {self._user}",
        )

    def _change_in_broker(self, broker: Broker, ids: Sequence[str]) -> None:
        if self._action == "cancel":
            broker.cancel(ids)
        elif self._action == "expedite":
            broker.expedite(ids)
        elif self._deliver_at is not None:
            broker.reschedule(ids, self._deliver_at)

    def _replay(self, destination: str, held_by_broker: bool, channel: str, ids: list[str], chosen: _Chosen) -> int:
        hold = Hold.BROKER if held_by_broker else Hold.LEDGER
        conn_id = destination or self._opened.conn_id
        with open_hook(conn_id, hold=hold) as hook:
            done = hook.get_conn().replay(DeadLetters(message_ids=tuple(ids), channel=channel))
        for each in done.missing:
            self._refuse_all([each], ConflictError(each, _not_dead(channel, held_by_broker)), chosen)
        return done.count

    def _change_each(self, change: Callable[[Sequence[str]], None], ids: list[str], chosen: _Chosen) -> int:
        """Change messages, all but those that are refused, and return how many were changed."""
        waiting = list(ids)
        while waiting:
            try:
                change(waiting)
                break
            except LifecycleError as error:
                # A broker that cannot recall one message cannot recall any.
                refused = waiting if isinstance(error, NoRecallError) else [error.message_id]
                self._refuse_all(refused, error, chosen)
                waiting = [each for each in waiting if each not in refused]
        return len(waiting)


def _not_dead(channel: str, held_by_broker: bool) -> str:
    if held_by_broker:
        return (
            f"is not in {channel}.dead; if its queue was missing, it is parked: run `airflow delay topology"
            " replay-parked`"
        )
    return "is not dead any more"
