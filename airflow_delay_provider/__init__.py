"""Delayed and scheduled messages in Apache Airflow.

Import the public names from here: ``from airflow_delay_provider import ScheduleMessageOperator``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_delay_provider.domain.arguments import Hold as Hold
    from airflow_delay_provider.domain.arguments import OnConflict as OnConflict
    from airflow_delay_provider.domain.arguments import OnPast as OnPast
    from airflow_delay_provider.domain.arguments import compose_message as compose_message
    from airflow_delay_provider.domain.backoff import Backoff as Backoff
    from airflow_delay_provider.domain.exceptions import DeferMessage as DeferMessage
    from airflow_delay_provider.domain.exceptions import DelayError as DelayError
    from airflow_delay_provider.domain.message import Message as Message
    from airflow_delay_provider.domain.message import decode_payload as decode_payload
    from airflow_delay_provider.hooks.delay import DelayHook as DelayHook
    from airflow_delay_provider.hooks.kafka import KafkaHook as KafkaHook
    from airflow_delay_provider.hooks.rabbitmq import RabbitMQHook as RabbitMQHook
    from airflow_delay_provider.operators.control import CancelMessageOperator as CancelMessageOperator
    from airflow_delay_provider.operators.control import ReplayMessageOperator as ReplayMessageOperator
    from airflow_delay_provider.operators.control import RescheduleMessageOperator as RescheduleMessageOperator
    from airflow_delay_provider.operators.schedule import ScheduleMessageOperator as ScheduleMessageOperator
    from airflow_delay_provider.operators.spark import SparkSubmitRetryOperator as SparkSubmitRetryOperator
    from airflow_delay_provider.sensors.message import MessageDispatchedSensor as MessageDispatchedSensor
    from airflow_delay_provider.sensors.message import MessageSensor as MessageSensor
    from airflow_delay_provider.spark.group import spark_submit_with_retries as spark_submit_with_retries
    from airflow_delay_provider.spark.policy import SparkRetryPolicy as SparkRetryPolicy
    from airflow_delay_provider.spark.retries import SparkRetries as SparkRetries

__version__ = "0.1.0"

# Loaded on first use: DAG files are parsed often and most use one or two of these.
_MODULE_OF = {
    "Backoff": "airflow_delay_provider.domain.backoff",
    "CancelMessageOperator": "airflow_delay_provider.operators.control",
    "DeferMessage": "airflow_delay_provider.domain.exceptions",
    "DelayError": "airflow_delay_provider.domain.exceptions",
    "DelayHook": "airflow_delay_provider.hooks.delay",
    "Hold": "airflow_delay_provider.domain.arguments",
    "KafkaHook": "airflow_delay_provider.hooks.kafka",
    "Message": "airflow_delay_provider.domain.message",
    "MessageDispatchedSensor": "airflow_delay_provider.sensors.message",
    "MessageSensor": "airflow_delay_provider.sensors.message",
    "OnConflict": "airflow_delay_provider.domain.arguments",
    "OnPast": "airflow_delay_provider.domain.arguments",
    "RabbitMQHook": "airflow_delay_provider.hooks.rabbitmq",
    "ReplayMessageOperator": "airflow_delay_provider.operators.control",
    "RescheduleMessageOperator": "airflow_delay_provider.operators.control",
    "ScheduleMessageOperator": "airflow_delay_provider.operators.schedule",
    "SparkRetries": "airflow_delay_provider.spark.retries",
    "SparkRetryPolicy": "airflow_delay_provider.spark.policy",
    "SparkSubmitRetryOperator": "airflow_delay_provider.operators.spark",
    "compose_message": "airflow_delay_provider.domain.arguments",
    "decode_payload": "airflow_delay_provider.domain.message",
    "spark_submit_with_retries": "airflow_delay_provider.spark.group",
}
__all__ = list(_MODULE_OF)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})


if not TYPE_CHECKING:  # A type checker would take every name for a public one.

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return value
