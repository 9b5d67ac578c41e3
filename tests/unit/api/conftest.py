"""Imports what Airflow's api-server imports, without the one warning that is not ours."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # Starlette's test client, which Airflow itself imports, prefers an HTTP library that Airflow does not install.
    warnings.filterwarnings("ignore", message="Using `httpx` with `starlette.testclient` is deprecated")
    import fastapi.testclient  # noqa: F401
