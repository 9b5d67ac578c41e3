"""Reading the committed progress while the broker elects new leaders."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import TopicPartition

from airflow_delay_provider.brokers.kafka.admin import LadderTopic
from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.dispatch import assignment
from airflow_delay_provider.brokers.kafka.dispatch.assignment import Assignment
from airflow_delay_provider.brokers.kafka.progress import Progress, note_of

RUNG, TOPIC_ID = "delay.v1.rung.4000ms", "x" * 22


def committed_at(offset: int, topic_id: str = TOPIC_ID) -> TopicPartition:
    return TopicPartition(RUNG, 0, offset, note_of(Progress(offset), topic_id))


@pytest.fixture
def opened() -> Assignment:
    return Assignment(KafkaClients(KafkaConfig.from_settings({}, host="127.0.0.1:1")))


def answers(monkeypatch: pytest.MonkeyPatch, *ends: int) -> list[int]:
    """Let the broker report these ends, one after the other, and the last one for ever; return those not reported."""
    left = list(ends)

    def log_ends(_clients: Any, _partitions: Any) -> dict[tuple[str, int], int]:
        return {(RUNG, 0): left.pop(0) if len(left) > 1 else left[0]}

    monkeypatch.setattr(assignment, "log_ends", log_ends)
    return left


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch) -> dict[str, LadderTopic]:
    monkeypatch.setattr(assignment, "CATCH_UP_SECONDS", 5.0)
    return {RUNG: LadderTopic(id=TOPIC_ID, partitions=1)}


def test_a_new_leader_that_is_behind_the_progress_is_asked_again(
    opened: Assignment, topics: dict[str, LadderTopic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D11, E1: with the first answer, committed records would be processed again and delivered twice."""
    answers(monkeypatch, 90, 95, 100)
    assert opened._read_ends([committed_at(100)], topics) == {(RUNG, 0): 100}


def test_a_log_that_stays_behind_the_progress_has_lost_records(
    opened: Assignment, topics: dict[str, LadderTopic], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assignment, "CATCH_UP_SECONDS", 0.2)
    answers(monkeypatch, 90)
    assert opened._read_ends([committed_at(100)], topics) == {(RUNG, 0): 90}


@pytest.mark.parametrize("topic_id", ["y" * 22, ""])
def test_a_topic_that_was_created_again_is_not_waited_for(
    opened: Assignment, topics: dict[str, LadderTopic], monkeypatch: pytest.MonkeyPatch, topic_id: str
) -> None:
    left = answers(monkeypatch, 3, 100)
    assert opened._read_ends([committed_at(100, topic_id)], topics) == {(RUNG, 0): 3}
    assert left == [100]
