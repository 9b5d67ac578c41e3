"""What users give as arguments and settings: the due time, policies and limits of a message, and values as text.

Errors name the argument and what to use instead.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, TypeVar
from uuid import uuid4

from airflow_delay_provider.domain.clock import floor_ms, from_ms
from airflow_delay_provider.domain.exceptions import (
    ConfigurationError,
    InvalidMessageError,
    PastDeliveryError,
    PayloadError,
    TooFarError,
    TooSoonError,
)
from airflow_delay_provider.domain.message import Message, Origin, encode_payload, require_aware

MAX_PRIORITY = 255
ChoiceT = TypeVar("ChoiceT", bound=StrEnum)
_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}


class OnPast(StrEnum):
    """What to do if the due time has passed."""

    DELIVER = "deliver"
    FAIL = "fail"


class OnConflict(StrEnum):
    """What to do if the id is taken."""

    #: Scheduling the same id again succeeds and changes nothing.
    KEEP = "keep"
    FAIL = "fail"
    #: The scheduled message gets the new content and due time.
    REPLACE = "replace"


class Hold(StrEnum):
    """Who holds a message until it is due."""

    #: The broker itself.
    BROKER = "broker"
    #: The ledger, from which the dispatcher sends it: it can be cancelled and rescheduled, whatever the broker.
    LEDGER = "ledger"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a connection accepts."""

    min_delay: timedelta = timedelta(0)
    max_delay: timedelta = timedelta(days=3660)
    max_payload_bytes: int = 1_048_576

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Limits:
        """Read ``min_delay`` and ``max_delay`` (seconds) and ``max_payload_bytes`` from a connection's extra."""
        given: dict[str, Any] = {}
        try:
            for name in ("min_delay", "max_delay"):
                if settings.get(name) not in (None, ""):
                    given[name] = timedelta(seconds=float(settings[name]))
            if settings.get("max_payload_bytes") not in (None, ""):
                given["max_payload_bytes"] = int(settings["max_payload_bytes"])
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(
                f"min_delay, max_delay and max_payload_bytes must be numbers ({error}); correct the connection's extra"
            ) from None
        limits = cls(**given)
        if limits.min_delay > limits.max_delay:
            raise ConfigurationError(
                f"min_delay: {limits.min_delay} is more than max_delay ({limits.max_delay}); correct the connection's"
                " extra"
            )
        return limits

    def check(self, message: Message, *, now: datetime) -> None:
        """Refuse a message that is too soon, too far or too large."""
        self.check_delay(message.deliver_at, now=now)
        self.check_payload(message)

    def check_delay(self, deliver_at: datetime, *, now: datetime) -> None:
        """Refuse a due time that is too soon or too far."""
        delay = deliver_at - now
        if delay < self.min_delay and self.min_delay > timedelta(0):
            raise TooSoonError(
                "deliver_at",
                f"{deliver_at.isoformat()} is less than min_delay ({self.min_delay}) from now",
                "choose a later time, or lower min_delay in the connection",
            )
        if delay > self.max_delay:
            raise TooFarError(
                "deliver_at",
                f"{deliver_at.isoformat()} is more than max_delay ({self.max_delay}) from now",
                "choose an earlier time, or raise max_delay in the connection",
            )

    def check_payload(self, message: Message) -> None:
        """Refuse a message that is too large."""
        if len(message.payload) > self.max_payload_bytes:
            raise PayloadError(
                "payload",
                f"{len(message.payload)} bytes are more than max_payload_bytes ({self.max_payload_bytes})",
                "send a reference to the data, or raise max_payload_bytes in the connection",
            )


def resolve_deliver_at(
    *,
    deliver_at: datetime | str | None = None,
    deliver_after: timedelta | float | str | None = None,
    on_past: OnPast | str = OnPast.DELIVER,
    now: datetime,
) -> datetime:
    """Return the due time from ``deliver_at`` or ``deliver_after``; neither means now.

    A due time that has passed is rounded down to the millisecond: rounded up, as messages round it, it would be in the
    future, and the message would wait.
    """
    policy = parse_choice("on_past", OnPast, on_past)
    if deliver_at is not None and deliver_after is not None:
        raise InvalidMessageError("deliver_at", "deliver_after is given, too", "give only one of them")
    if deliver_at is not None:
        due = require_aware("deliver_at", parse_moment("deliver_at", deliver_at))
    elif deliver_after is not None:
        due = _add(now, parse_delay("deliver_after", deliver_after))
    else:
        due = now
    if due < now and policy is OnPast.FAIL:
        raise PastDeliveryError(
            "deliver_at" if deliver_at is not None else "deliver_after",
            f"{due.isoformat()} has passed",
            'choose a later time, or use on_past="deliver"',
        )
    return due if due > now else from_ms(floor_ms(due))


def compose_message(
    channel: str,
    payload: Any,
    *,
    deliver_at: datetime | str | None = None,
    deliver_after: timedelta | float | str | None = None,
    on_past: OnPast | str = OnPast.DELIVER,
    message_id: str | None = None,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    content_type: str | None = None,
    priority: int = 0,
    origin: Origin | None = None,
    now: datetime,
) -> Message:
    """Return a message from what a user gives (operator, CLI, HTTP), or say what is wrong."""
    data, natural_type = encode_payload(payload)
    try:
        priority = int(str(priority))
    except (TypeError, ValueError):
        raise InvalidMessageError("priority", f"{priority!r} is not a whole number", "use 0 to 255") from None
    if not 0 <= priority <= MAX_PRIORITY:
        raise InvalidMessageError("priority", f"{priority} is out of range", f"use 0 to {MAX_PRIORITY}")
    return Message(
        channel=channel,
        payload=data,
        deliver_at=resolve_deliver_at(deliver_at=deliver_at, deliver_after=deliver_after, on_past=on_past, now=now),
        id=message_id if message_id is not None else str(uuid4()),
        key=key,
        headers=headers or {},
        content_type=content_type or natural_type,
        priority=priority,
        origin=origin,
    )


def _add(now: datetime, delay: timedelta) -> datetime:
    try:
        return now + delay
    except OverflowError:
        raise TooFarError("deliver_after", f"{delay} from now is out of range", "choose a shorter delay") from None


def parse_choice(name: str, choices: type[ChoiceT], value: ChoiceT | str) -> ChoiceT:
    """Return the member of ``choices`` that ``value`` names."""
    try:
        return choices(value)
    except ValueError:
        raise InvalidMessageError(name, f"{value!r} is unknown", f"use one of {', '.join(choices)}") from None


def parse_moment(name: str, value: datetime | str) -> datetime:
    """Return a time given as a datetime or as ISO-8601 text."""
    if isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(value.strip())
    except (AttributeError, TypeError, ValueError):
        raise InvalidMessageError(
            name,
            f"{value!r} is not a time",
            "use an aware datetime or ISO-8601 such as 2030-01-31T17:00:00Z",
        ) from None


def parse_delay(name: str, value: timedelta | float | str) -> timedelta:
    """Return a delay given as a timedelta or as a number of seconds."""
    if isinstance(value, timedelta):
        return value
    try:
        return timedelta(seconds=float(value))
    except (TypeError, ValueError, OverflowError):
        raise InvalidMessageError(name, f"{value!r} is not a delay", "use a timedelta or a number of seconds") from None


def parse_count(name: str, text: str) -> int:
    """Return a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise InvalidMessageError(name, f"{text!r} is not a whole number of at least 1", "use for example 100")
    return number


def parse_number(name: str, text: str, *, from_zero: bool = False) -> float:
    """Return a number above 0, or of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf or (number == 0 and not from_zero):
        least = "of at least 0" if from_zero else "above 0"
        raise InvalidMessageError(name, f"{text!r} is not a number {least}", "use for example 0.5 or 500")
    return number


def load_function(field: str, path: str, *, example: str) -> Callable[..., Any]:
    """Return the function of a dotted path; triggers are stored as text, so they name functions by path."""
    try:
        function = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{field}: {path!r} cannot be imported ({error}); give the dotted path of a function in a module that"
            f" workers and triggerers can import, such as {example!r}"
        ) from error
    if not callable(function):
        raise ConfigurationError(f"{field}: {path!r} is not a function; give the dotted path of one")
    loaded: Callable[..., Any] = function
    return loaded


def read_number(settings: Mapping[str, Any], name: str, *, least: float = 0, most: float = 1e9) -> float | None:
    """Return a number from a connection's extra; None if it is not given."""
    value = settings.get(name)
    if value in (None, ""):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not least <= number <= most:
        raise ConfigurationError(
            f"{name}: {value!r} is not a number from {least:g} to {most:.0f}; correct the connection's extra"
        )
    return number


def read_flag(settings: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return a switch from a connection's extra."""
    value = settings.get(name)
    if value in (None, ""):
        return default
    text = str(value).lower()
    if text not in _TRUE | _FALSE:
        raise ConfigurationError(f"{name}: {value!r} is neither true nor false; correct the connection's extra")
    return text in _TRUE
