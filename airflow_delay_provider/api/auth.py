"""Access checks and masking. The only file that uses Airflow's security internals."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal

from airflow._shared.secrets_masker import redact
from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import (
    AccessView,
    ConnectionDetails,
    DagAccessEntity,
    DagDetails,
)
from airflow.api_fastapi.core_api.security import get_user, requires_access_view
from airflow.models import Connection
from airflow.models.dag import DagModel
from fastapi import Depends, Header, HTTPException

#: The signed-in user; anonymous requests get 401.
CurrentUser = Annotated[BaseUser, Depends(get_user)]

#: Guards the whole application, because Airflow mounts plugins without any check. Permits reading only.
require_reader = requires_access_view(AccessView.PLUGINS)


def require_custom_header(x_requested_with: Annotated[str | None, Header()] = None) -> None:
    """Refuse requests that a page of another site could send: a browser adds this header only for Airflow's own pages.

    Any value will do. Without it, the cookie of a signed-in user would be enough.
    """
    if not x_requested_with:
        raise HTTPException(
            403, "The header X-Requested-With is missing; send it with any value, such as airflow-delay."
        )


class Permissions:
    """What one user may do; asks Airflow once for each DAG and connection."""

    def __init__(self, user: BaseUser) -> None:
        self.user = user
        self._may_access_dag: Callable[[Literal["GET", "PUT"], str], bool] = cache(self._ask_for_dag)
        self.may_edit_connection: Callable[[str], bool] = cache(self._ask_for_connection)

    def may_read(self, dag_id: str | None) -> bool:
        """Whether the user may see the task instances of a DAG; messages without a DAG are for all readers."""
        return dag_id is None or self._may_access_dag("GET", dag_id)

    def may_edit(self, dag_id: str | None, conn_id: str) -> bool:
        """Whether the user may change messages of a DAG's tasks; without a DAG, whether they administer the broker."""
        return self.may_edit_connection(conn_id) if dag_id is None else self._may_access_dag("PUT", dag_id)

    def _ask_for_dag(self, method: Literal["GET", "PUT"], dag_id: str) -> bool:
        details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
        return get_auth_manager().is_authorized_dag(
            method=method, access_entity=DagAccessEntity.TASK_INSTANCE, details=details, user=self.user
        )

    def _ask_for_connection(self, conn_id: str) -> bool:
        details = ConnectionDetails(conn_id=conn_id, team_name=Connection.get_team_name(conn_id))
        return get_auth_manager().is_authorized_connection(method="PUT", details=details, user=self.user)


def _permissions_of(user: CurrentUser) -> Permissions:
    return Permissions(user)


#: What the signed-in user may do.
CurrentPermissions = Annotated[Permissions, Depends(_permissions_of)]


def mask_secrets(value: Any) -> Any:
    """Mask what Airflow masks elsewhere: values with sensitive names, and secrets of connections."""
    return redact(value)
