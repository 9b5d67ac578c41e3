"""What the HTTP API accepts and returns."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from airflow_delay_provider.domain.message import CHANNEL_FORM

#: One call never changes more messages; repeat it for the others.
MAX_PER_ACTION = 1000

StateName = Literal["SCHEDULED", "DISPATCHED", "CANCELLED", "DEAD"]


def _require_storable(text: str) -> str:
    """Refuse what PostgreSQL cannot compare with."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("contains characters that cannot be stored")
    return text


def _require_iso(value: object) -> object:
    if isinstance(value, datetime):
        return value
    if not isinstance(value, str) or not re.match(r"\d{4}-\d\d-\d\d", value, re.ASCII):
        raise ValueError("use ISO-8601 with a time zone, such as 2030-01-31T17:00:00Z")
    return value


#: A criterion: no message has longer names.
Text = Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_require_storable)]
Channel = Annotated[str, Field(json_schema_extra={"pattern": f"^{CHANNEL_FORM.pattern}$"})]
#: ISO-8601 with a time zone; numbers could be seconds or milliseconds.
Moment = Annotated[AwareDatetime, BeforeValidator(_require_iso)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
MapIndex = Annotated[int, Field(ge=-1, le=2**31 - 1)]


class Answer(BaseModel):
    """A response."""

    model_config = ConfigDict(extra="forbid")


class Body(BaseModel):
    """A request; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class Problem(BaseModel):
    """An error, as RFC 9457 defines it."""

    type: str = "about:blank"
    title: str
    status: int
    #: What is wrong and what to do.
    detail: str
    #: The field or parameter that is wrong.
    field: str | None = None


# -- messages --------------------------------------------------------------------------------------------------------


class TaskOrigin(Answer):
    """The task instance that scheduled a message."""

    dag_id: str
    run_id: str
    task_id: str
    #: -1 if the task is not mapped.
    map_index: int


class MessageSummary(Answer):
    """A message without its content."""

    id: str
    channel: str
    state: StateName
    #: The number of the state: 100 to 103.
    status: int
    deliver_at: datetime
    scheduled_at: datetime
    updated_at: datetime
    #: Null until it is dispatched.
    dispatched_at: datetime | None
    lateness_ms: int | None
    #: How long a scheduled message is overdue; null if it is not.
    overdue_ms: int | None
    content_type: str
    priority: int
    key: str | None
    handled_count: int
    #: Grows with every replace, reschedule, expedite and requeue.
    generation: int
    #: The Airflow connection of its broker.
    connection: str
    held_by: Literal["ledger", "broker"]
    #: Null if no task scheduled it.
    origin: TaskOrigin | None
    #: Whether you may cancel, reschedule, expedite or replay it.
    can_edit: bool
    #: Path of the message in this API.
    link: str


class MessagePage(Answer):
    """One page of messages, ordered by delivery time."""

    messages: list[MessageSummary]
    #: Tokens for ``page``.
    next: str | None
    prev: str | None
    #: Paths of the next and previous page.
    links: PageLinks
    #: A token: not every message was searched yet, and this page continues the search.
    continuation: str | None
    #: Why messages of this connection are not listed at all; null if they are.
    notice: str | None


class PageLinks(Answer):
    """Paths of other pages."""

    next: str | None
    prev: str | None


class HistoryEntry(Answer):
    """Something that happened to a message."""

    change: str
    #: The state after it.
    state: StateName
    at: datetime
    deliver_at: datetime
    channel: str
    reason: str | None


class History(Answer):
    """What happened to a message, oldest first."""

    message_id: str
    entries: list[HistoryEntry]
    #: Earlier entries that are left out.
    omitted: int


class PayloadPreview(Answer):
    """The beginning of a payload, with secrets masked."""

    size: int
    #: ``text`` and ``json`` are shown as text, others as base64; ``hidden`` by [delay] show_payloads.
    format: Literal["json", "text", "base64", "hidden"]
    content: str | None
    is_truncated: bool


class MessageDetail(MessageSummary):
    """A message with its content."""

    headers: dict[str, str]
    payload: PayloadPreview
    #: Path of the task instance that scheduled it, in Airflow's UI.
    task_link: str | None
    #: Whether that task instance is deferred now, until this message or another one is dispatched.
    is_awaited: bool
    #: Why no dispatcher will deliver it, and what to do; null if no problem is known.
    warning: str | None
    #: What you can do with it now.
    actions: list[Literal["cancel", "reschedule", "expedite", "replay"]]
    #: Whether you may download the whole payload.
    can_download: bool


class StateCount(Answer):
    """How many messages are in one state."""

    count: int
    links: CountLinks


class CountLinks(Answer):
    """Where the counted messages are listed."""

    messages: str


class Overdue(Answer):
    """Scheduled messages whose delivery time has passed."""

    count: int
    #: False: there are more.
    is_exact: bool
    oldest_deliver_at: datetime | None


class Counts(Answer):
    """Messages by state, of one channel or of all."""

    counts: dict[StateName, StateCount]
    #: The earliest delivery time of a scheduled message; null if none is scheduled.
    next_scheduled_message_at: datetime | None
    overdue: Overdue
    #: The server's time, for countdowns.
    now: datetime


class ChannelCounts(Answer):
    """One channel."""

    channel: str
    counts: dict[StateName, int]


class Channels(Answer):
    """Channels in alphabetical order."""

    channels: list[ChannelCounts]
    #: Pass it as ``after`` for more channels; null at the end.
    next: str | None


# -- scheduling and control ------------------------------------------------------------------------------------------


class ScheduleBody(Body):
    """A message to schedule."""

    channel: Channel
    payload: JsonValue = Field(description="Text is stored as text/plain, anything else as JSON.")
    payload_base64: bool = Field(False, description="The payload is base64 text of binary data.")
    deliver_at: Moment | None = Field(None, description="Not together with deliver_after.")
    deliver_after: Seconds | None = Field(None, description="Seconds from now.")
    message_id: Text | None = Field(None, description="By default a new UUID.")
    key: str | None = None
    headers: dict[str, str] = {}
    content_type: str | None = None
    priority: int = Field(0, ge=0, le=255)
    conn_id: Text | None = Field(None, description="Connection of the broker; by default delay_default.")
    hold: Literal["broker", "ledger"] | None = None
    on_past: Literal["deliver", "fail"] = "deliver"
    on_conflict: Literal["fail", "keep", "replace"] | None = Field(
        None, description="By default fail, or keep for a broker that cannot look up ids."
    )


class Scheduled(Answer):
    """The broker's confirmation."""

    message_id: str
    outcome: Literal["scheduled", "dispatched", "kept", "replaced"]
    deliver_at: datetime
    link: str


class MessageFilter(Body):
    """Selects messages; the same names as the parameters of the list."""

    channel: Text | None = None
    connection: Text | None = None
    dag_id: Text | None = None
    run_id: Text | None = None
    task_id: Text | None = None
    map_index: MapIndex | None = None
    due_from: Moment | None = None
    due_to: Moment | None = Field(None, description="Exclusive.")
    search: Text | None = Field(None, description="Part of the id.")


class Selection(Body):
    """Messages by id or by filter, but not both."""

    ids: list[Text] | None = Field(None, min_length=1, max_length=MAX_PER_ACTION)
    filter: MessageFilter | None = None
    conn_id: Text | None = Field(None, description="The ledger of this connection; by default the configured one.")
    dry_run: bool = Field(False, description="Only count the messages.")
    page: Text | None = Field(None, description="With a filter: continue with ``next`` of the last answer.")


class RescheduleBody(Selection):
    """Messages and their new delivery time."""

    deliver_at: Moment | None = None
    deliver_after: Seconds | None = Field(None, description="Seconds from now; not together with ``page``.")
    on_past: Literal["deliver", "fail"] = "deliver"
    generation: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="For one id: refuse with 409 if the message has changed since this generation.",
    )


class Refusal(Answer):
    """A message that was not changed."""

    id: str
    status: int
    detail: str


class ActionResult(Answer):
    """What an action did, or what it would do."""

    action: Literal["cancel", "reschedule", "expedite", "replay"]
    dry_run: bool
    #: Messages that the selection matches and that you may change; an action handles at most 1000 at once.
    matched: int
    #: False: there are more.
    is_exact: bool
    changed: int
    refused: list[Refusal]
    #: Further messages match the filter: send the same request with this ``page``.
    next: str | None
    #: The new delivery time, after a reschedule.
    deliver_at: datetime | None


# -- dead letters ----------------------------------------------------------------------------------------------------


class DeadLetter(MessageSummary):
    """A dead message and why it is dead."""

    reason: str | None
    died_at: datetime


class DeadLetterPage(Answer):
    """One page of dead letters."""

    messages: list[DeadLetter]
    next: str | None
    prev: str | None
    links: PageLinks
    continuation: str | None
