"""Access checks and masking. The only file that uses Airflow's security internals."""

from __future__ import annotations

from typing import Annotated, Any

from airflow._shared.secrets_masker import redact
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, DagAccessEntity
from airflow.api_fastapi.core_api.security import get_user, requires_access_dag, requires_access_view
from fastapi import Depends, Request

from airflow_delay_provider.domain.message import Origin

#: The signed-in user; anonymous requests get 401.
CurrentUser = Annotated[BaseUser, Depends(get_user)]

#: Guards the whole application, because Airflow mounts plugins without any check. Permits reading only.
require_reader = requires_access_view(AccessView.PLUGINS)


def require_task_access(request: Request, user: BaseUser, origin: Origin) -> None:
    """Raise 403 unless the user may read the task instances of the DAG that scheduled the message."""
    requires_access_dag("GET", DagAccessEntity.TASK_INSTANCE, origin.dag_id)(request, user)


def mask_secrets(value: Any) -> Any:
    """Mask what Airflow masks elsewhere: values with sensitive names, and secrets of connections."""
    return redact(value)
