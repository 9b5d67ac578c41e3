"""An auth manager whose viewers may read the task instances of one DAG only."""

from __future__ import annotations

from typing import Any

from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

OPEN_DAG = "open_invoices"
CLOSED_DAG = "secret_payroll"


class SelectiveAuthManager(SimpleAuthManager):
    """Admins may do everything; viewers may read ``OPEN_DAG``."""

    def is_authorized_dag(
        self,
        *,
        method: Any,
        user: SimpleAuthManagerUser,
        access_entity: DagAccessEntity | None = None,
        details: DagDetails | None = None,
    ) -> bool:
        if user.role and user.role.upper() == "ADMIN":
            return True
        asked = (method, access_entity, details.id if details else None)
        return asked == ("GET", DagAccessEntity.TASK_INSTANCE, OPEN_DAG)
