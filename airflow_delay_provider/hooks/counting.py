"""What was scheduled, told to Airflow's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from airflow_delay_provider.metrics import AirflowMetrics

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.base import Receipt
    from airflow_delay_provider.domain.message import Message


def count_confirmed(confirmed: Iterable[tuple[Message, Receipt]]) -> None:
    """Count the messages that a broker has newly stored, by channel."""
    new = Counter(message.channel for message, receipt in confirmed if receipt.outcome != "kept")
    for channel, count in new.items():
        AirflowMetrics().scheduled(count, channel=channel)
