"""A secrets backend of the tests: connections in a file that may change, and one that never answers."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from airflow.secrets import BaseSecretsBackend

FILE_VARIABLE = "DELAY_TEST_CONNECTIONS_FILE"
#: Looking this connection up never returns.
HANGS = "hangs"


class FileSecrets(BaseSecretsBackend):
    """Reads the file at each lookup, as a vault is asked each time."""

    def get_conn_value(self, conn_id: str, team_name: str | None = None) -> str | None:  # noqa: ARG002 - Airflow's
        if conn_id == HANGS:
            threading.Event().wait()
        known = json.loads(Path(os.environ[FILE_VARIABLE]).read_text())
        return json.dumps(known[conn_id]) if conn_id in known else None
