"""The button on a task's page that opens its message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from airflow.sdk.bases.operatorlink import BaseOperatorLink

from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

    from airflow_delay_provider.domain.message import Origin

#: The route of the pages in Airflow's UI.
UI_ROUTE = "delayed-messages"


class DelayedMessageLink(BaseOperatorLink):
    """Opens the page of the message that the task scheduled, or a list of its messages."""

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


def messages_url(origin: Origin, conn_id: str = DEFAULT_CONN_ID) -> str:
    """Return the URL of the list of a task's messages in Airflow's UI."""
    filters = {"dag_id": origin.dag_id, "run_id": origin.run_id, "task_id": origin.task_id}
    return _url("messages", filters, conn_id)


def message_url(message_id: str, conn_id: str = DEFAULT_CONN_ID) -> str:
    """Return the URL of a message's page in Airflow's UI."""
    return _url(f"messages/{quote(message_id, safe='')}", {}, conn_id)


def _url(path: str, filters: Mapping[str, str], conn_id: str) -> str:
    from airflow.sdk.configuration import conf

    base: str = conf.get("api", "base_url", fallback="") or ""
    query = dict(filters) if conn_id == DEFAULT_CONN_ID else {**filters, "conn_id": conn_id}
    url = f"{base.rstrip('/')}/plugin/{UI_ROUTE}/{path}"
    return f"{url}?{urlencode(query, quote_via=quote, safe='')}" if query else url
