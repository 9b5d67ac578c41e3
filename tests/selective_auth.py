"""An auth manager that lets viewers read, and editors change, the task instances of one DAG only."""

from __future__ import annotations

from typing import Any

from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

OPEN_DAG = "open_invoices"
CLOSED_DAG = "secret_payroll"
_METHODS = {"VIEWER": {"GET"}, "USER": {"GET", "PUT"}}


class SelectiveAuthManager(SimpleAuthManager):
    """Admins may do everything; viewers may read ``OPEN_DAG``, and users may also change its task instances."""

    def is_authorized_dag(
        self,
        *,
        method: Any,
        user: SimpleAuthManagerUser,
        access_entity: DagAccessEntity | None = None,
        details: DagDetails | None = None,
    ) -> bool:
        role = (user.role or "").upper()
        if role == "ADMIN":
            return True
        asked = (access_entity, details.id if details else None)
        return asked == (DagAccessEntity.TASK_INSTANCE, OPEN_DAG) and method in _METHODS.get(role, set())
