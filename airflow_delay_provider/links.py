"""The button on a task's page that opens its message."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from airflow.sdk.bases.operatorlink import BaseOperatorLink

from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


#: The route of the pages in Airflow's UI.
UI_ROUTE = "delayed-messages"


class DelayedMessageLink(BaseOperatorLink):
    """Opens the page of the first message that the task scheduled."""

    name = "Delayed message"
    xcom_key = "delayed_message_link"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the URL again at the end of the task, because Airflow stores the result."""
        known: str | None = getattr(operator, "message_link", None)
        if known is not None:
            return known
        # The task was resumed after a deferral, so another process scheduled the message.
        from airflow.sdk.execution_time.xcom import XCom

        stored: str | None = XCom.get_value(ti_key=ti_key, key=self.xcom_key)
        return stored or ""


def message_url(message_id: str, conn_id: str = DEFAULT_CONN_ID) -> str:
    """Return the URL of a message's page in Airflow's UI."""
    from airflow.sdk.configuration import conf

    base: str = conf.get("api", "base_url", fallback="") or ""
    url = f"{base.rstrip('/')}/plugin/{UI_ROUTE}/messages/{quote(message_id, safe='')}"
    return url if conn_id == DEFAULT_CONN_ID else f"{url}?conn_id={quote(conn_id, safe='')}"
