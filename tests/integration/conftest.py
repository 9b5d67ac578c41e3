from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.api_server import ApiServer, run_api_server


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One api-server for all files that use it; they run on one worker."""
    with run_api_server(tmp_path_factory.mktemp("airflow")) as running:
        yield running
