"""How much is fetched ahead. Finished records are removed on a best-effort basis: no step waits long for it."""

from __future__ import annotations

import socket
import time

import pytest

from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.dispatch import assignment
from airflow_delay_provider.brokers.kafka.dispatch.assignment import (
    FAR_MS,
    FEW,
    FEW_BYTES,
    MANY,
    MANY_BYTES,
    Trimmer,
    is_full,
    is_hungry,
)
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import PartitionQueue, Record
from airflow_delay_provider.brokers.kafka.progress import Progress
from airflow_delay_provider.brokers.kafka.wire import encode_key

HOLD_MS = 64_000


def test_one_that_ends_waits_for_all_answers_together_and_not_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "TRIM_STOP_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        trimmer = Trimmer(KafkaClients(KafkaConfig.from_settings({}, host=f"{host}:{port}")))
        trimmer.note((f"topic-{number}", partition, 1) for number in range(20) for partition in range(2))
        begun = time.monotonic()
        trimmer.trim(now=True)
        assert time.monotonic() - begun < 40 * 0.5


@pytest.mark.parametrize(
    ("records", "size", "seconds_left", "full", "hungry"),
    [
        (0, 0, 0, False, True),
        (FEW - 1, 100, 60, False, False),
        (FEW, 100, 60, True, False),
        # Due soon, so more is fetched, up to a bound.
        (FEW, 100, 1, False, True),
        (MANY, 100, 1, True, False),
        # The same with few large messages.
        (2, FEW_BYTES // 4, 60, False, False),
        (2, FEW_BYTES // 2, 60, True, False),
        (2, FEW_BYTES // 2, 1, False, True),
        (2, MANY_BYTES // 2, 1, True, False),
    ],
)
def test_far_records_are_fetched_in_small_numbers_and_near_ones_up_to_a_bound(
    records: int, size: int, seconds_left: int, full: bool, hungry: bool
) -> None:
    queue, now_ms = PartitionQueue("rung", HOLD_MS, Progress(0)), 1_000_000_000
    key, value = encode_key(now_ms + HOLD_MS, "m1"), b"x" * size
    put_ms = now_ms + seconds_left * 1000 - HOLD_MS
    for offset in range(records):
        queue.add(Record(offset, put_ms, key, value))
    assert (is_full(queue, now_ms), is_hungry(queue, now_ms)) == (full, hungry)
    assert FAR_MS < 60_000
