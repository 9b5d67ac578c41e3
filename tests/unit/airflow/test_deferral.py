"""A task is not resumed before Airflow has noticed the end of the process that deferred it."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import Mock

import pytest

from airflow_delay_provider.triggers.broker_thread import pause_after_deferral
from airflow_delay_provider.triggers.message import MessageDispatchedTrigger


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was paused, without pausing."""
    asked: list[float] = []

    async def sleep(seconds: float) -> None:
        asked.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return asked


@pytest.fixture
def trigger() -> MessageDispatchedTrigger:
    """A trigger as the triggerer runs it."""
    trigger = MessageDispatchedTrigger(message_ids=["a"])
    trigger._task_instance = Mock()
    return trigger


async def test_a_message_that_is_dispatched_at_once_resumes_its_task_ten_seconds_later(
    trigger: MessageDispatchedTrigger, pauses: list[float]
) -> None:
    await pause_after_deferral(trigger, began=time.monotonic())
    assert pauses == [pytest.approx(10, abs=1)]


async def test_a_long_wait_is_made_no_longer(trigger: MessageDispatchedTrigger, pauses: list[float]) -> None:
    await pause_after_deferral(trigger, began=time.monotonic() - 60)
    assert pauses[0] <= 0


async def test_the_pause_follows_airflows_own_setting(
    trigger: MessageDispatchedTrigger, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL", "60")
    await pause_after_deferral(trigger, began=time.monotonic())
    assert pauses == [pytest.approx(65, abs=1)]


async def test_without_a_scheduler_there_is_no_pause(pauses: list[float]) -> None:
    await pause_after_deferral(MessageDispatchedTrigger(message_ids=["a"]), began=time.monotonic())
    assert pauses == []
