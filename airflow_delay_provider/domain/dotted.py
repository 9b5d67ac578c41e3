"""Functions of users, named by dotted paths because triggers are stored as text."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from airflow_delay_provider.exceptions import ConfigurationError


def load_function(field: str, path: str, *, example: str) -> Callable[..., Any]:
    """Return the function at a dotted path that was given for ``field``."""
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
