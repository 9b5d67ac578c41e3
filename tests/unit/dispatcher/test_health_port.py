"""The port of ``/health`` and ``/metrics``."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from airflow_delay_provider.dispatcher import monitoring
from airflow_delay_provider.dispatcher.monitoring import HealthServer
from airflow_delay_provider.domain.exceptions import ConfigurationError


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The default port, which another program uses."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = int(other.getsockname()[1])
        monkeypatch.setattr(monitoring, "DEFAULT_PORT", port)
        yield port


def serve(port: int, stack: ExitStack) -> int:
    server = HealthServer("127.0.0.1", port, reports={}, metrics=lambda: b"")
    server.start()
    stack.callback(server.stop)
    return int(server.url.rpartition(":")[2])


def test_dispatchers_of_one_machine_take_the_default_port_and_the_next_ones(taken: int) -> None:
    with ExitStack() as stack:
        first, second = serve(taken, stack), serve(taken, stack)
        assert taken < first < second <= taken + monitoring.NEXT_PORTS


def test_a_port_that_was_chosen_is_never_replaced(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "DEFAULT_PORT", 1)
    with ExitStack() as stack, pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{taken}"):
        serve(taken, stack)


def test_no_free_port_at_all_is_an_error(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "NEXT_PORTS", 0)
    with ExitStack() as stack, pytest.raises(ConfigurationError, match="0 for any free port, or -1 for none"):
        serve(taken, stack)
