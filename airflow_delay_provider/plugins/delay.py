"""Mounts the web application in Airflow's API server."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from airflow.sdk.plugins_manager import AirflowPlugin


class DelayPlugin(AirflowPlugin):
    """Registers the web application under ``/delay``."""

    name = "delay"

    @cached_property
    def fastapi_apps(self) -> list[Any]:  # type: ignore[override]  # Airflow reads it and never sets it
        """Create the application when it is mounted, because every task loads plugins but needs no web code."""
        from airflow_delay_provider.api.app import create_app

        return [{"app": create_app(), "url_prefix": "/delay", "name": "Delayed messages"}]
