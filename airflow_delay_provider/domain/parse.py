"""Read values that users give as text; errors name the field and what to use instead."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, TypeVar

from airflow_delay_provider.domain.exceptions import ConfigurationError, InvalidMessageError

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)
_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}


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
