"""The button on a task's page that leads to its message."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from airflow.sdk.bases.operatorlink import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


class DelayedMessageLink(BaseOperatorLink):
    """Leads to the page of the first message that the task scheduled."""

    name = "Delayed message"
    xcom_key = "delayed_message_link"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:  # noqa: ARG002 - Airflow's signature
        """Return what the task stored; Airflow stores it once more when the task ends."""
        from airflow.sdk.execution_time.xcom import XCom

        link: str | None = XCom.get_value(ti_key=ti_key, key=self.xcom_key)
        return link or ""


def message_url(message_id: str) -> str:
    """Return the address of a message's page under ``[api] base_url``."""
    from airflow.sdk.configuration import conf

    base: str = conf.get("api", "base_url", fallback="") or ""
    return f"{base.rstrip('/')}/delay/messages/{quote(message_id, safe='')}"
