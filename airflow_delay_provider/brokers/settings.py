"""Reading numbers and switches from the extra of a connection, with a sentence where they are none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from airflow_delay_provider.exceptions import ConfigurationError

_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}


def read_number(settings: Mapping[str, Any], name: str, *, least: float = 0, most: float = 1e9) -> float | None:
    """Return the number of this name, None where it is not given."""
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
    """Return the switch of this name."""
    value = settings.get(name)
    if value in (None, ""):
        return default
    text = str(value).lower()
    if text not in _TRUE | _FALSE:
        raise ConfigurationError(f"{name}: {value!r} is neither true nor false; correct the connection's extra")
    return text in _TRUE
