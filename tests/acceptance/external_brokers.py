"""Checks that the tests of RabbitMQ and of Kafka in a real Airflow share."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.domain.message import Message
from tests.acceptance.runs import Run
from tools.servers.airflow_api import AirflowApi


def receive(broker: Broker, channel: str, n: int, *, seconds: float = 120) -> list[Message]:
    """Take at least ``n`` messages from a channel."""
    deadline, received = time.monotonic() + seconds, list[Message]()
    while len(received) < n and time.monotonic() < deadline:
        deliveries = broker.receive(channel, limit=500)
        broker.ack(deliveries)
        received += [delivery.message for delivery in deliveries]
        if not deliveries:
            time.sleep(0.05)
    return received


def require_message_of_task(broker: Broker, channel: str, run: Run, task_id: str) -> None:
    """The one message that has arrived is the task's, whole and not early."""
    [message] = receive(broker, channel, 1)
    assert message.id == run.result(task_id)
    assert json.loads(message.payload) == {"run": run.run_id}
    assert message.origin is not None
    assert (message.origin.run_id, message.origin.task_id) == (run.run_id, task_id)
    assert message.deliver_at <= broker.clock.now()


def press_button(api: AirflowApi, form: Mapping[str, Any], *, status: bool, sentence: str) -> None:
    """Test a connection as its form does; the answer is as expected and shows no password that begins with s3cret."""
    body = {**form, "connection_id": "in_the_form", "extra": json.dumps(form["extra"])}
    answer = api.http.post("/api/v2/connections/test", json=body, timeout=60)
    assert answer.is_success, answer.text
    found = answer.json()
    assert found["status"] is status, found
    assert "s3cret" not in found["message"]
    assert re.search(sentence, found["message"]), found
