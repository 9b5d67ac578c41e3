"""Mounts the web application in Airflow's API server and registers its pages in Airflow's UI."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from airflow.sdk.plugins_manager import AirflowPlugin

#: The bundle stores its component under this name, where Airflow looks for it.
APP_NAME = "Delayed messages"


class DelayPlugin(AirflowPlugin):
    """Registers the web application under ``/delay``, its pages, and the tab of a task instance."""

    name = "delay"

    @cached_property
    def fastapi_apps(self) -> list[Any]:  # type: ignore[override]  # Airflow reads it and never sets it
        """Create the application when it is mounted, because every task loads plugins but needs no web code."""
        from airflow_delay_provider.api.app import create_app

        return [{"app": create_app(), "url_prefix": "/delay", "name": APP_NAME}]

    @cached_property
    def react_apps(self) -> list[Any]:  # type: ignore[override]  # as above
        """Return the pages and the tab: one component, which shows the tab where it gets a task instance."""
        from airflow_delay_provider.api.static import static_url

        app = {
            "name": APP_NAME,
            "bundle_url": static_url("main.js"),
            "icon": static_url("icon.svg"),
            "icon_dark_mode": static_url("icon-dark.svg"),
        }
        return [
            {**app, "destination": "nav", "url_route": "delayed-messages"},
            {**app, "destination": "task_instance", "url_route": "delayed-messages-of-task"},
        ]
