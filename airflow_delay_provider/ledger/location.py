"""Where the ledger is when nobody says otherwise; knows Airflow's environment, not Airflow."""

from __future__ import annotations

import os
from pathlib import Path

URL_VARIABLE = "AIRFLOW__DELAY__LEDGER_URL"


def default_ledger_url() -> str:
    """Return the URL of the environment, else a SQLite file in Airflow's home."""
    home = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser().absolute()
    return os.environ.get(URL_VARIABLE) or f"sqlite:///{home / 'delay.db'}"
