"""Finished records are removed on a best-effort basis: no step waits long for it."""

from __future__ import annotations

import socket
import time

import pytest

from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.dispatch import assignment
from airflow_delay_provider.brokers.kafka.dispatch.assignment import Trimmer


def test_one_that_ends_waits_for_all_answers_together_and_not_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "TRIM_STOP_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        trimmer = Trimmer(KafkaClients(KafkaConfig.from_settings({}, host=f"{host}:{port}")))
        trimmer.note((f"topic-{number}", partition, 1) for number in range(20) for partition in range(2))
        begun = time.monotonic()
        trimmer.trim(now=True)
        assert time.monotonic() - begun < 40 * 0.5
