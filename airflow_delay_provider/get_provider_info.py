"""What Airflow learns of this package at every start; importing it costs nothing."""

from __future__ import annotations

from typing import Any

from airflow_delay_provider.connection_forms import CONNECTION_TYPES

_INTEGRATION = "Delayed messages"
_VERSION = "0.1.0"


def get_provider_info() -> dict[str, Any]:
    """Return the provider description, in the form of Airflow's ``provider_info.schema.json``."""
    return {
        "package-name": "airflow-delay-provider",
        "name": "Delay",
        "description": "Delayed and scheduled messages: never early, never lost, no worker slot waiting.",
        "integrations": [{"integration-name": _INTEGRATION, "tags": ["software"]}],
        "hooks": _modules(
            "airflow_delay_provider.hooks.delay",
            "airflow_delay_provider.hooks.rabbitmq",
            "airflow_delay_provider.hooks.kafka",
            "airflow_delay_provider.hooks.spark",
        ),
        "operators": _modules(
            "airflow_delay_provider.operators.message",
            "airflow_delay_provider.operators.replay",
            "airflow_delay_provider.operators.spark",
        ),
        "sensors": _modules("airflow_delay_provider.sensors.message", "airflow_delay_provider.sensors.spark"),
        "triggers": _modules("airflow_delay_provider.triggers.message", "airflow_delay_provider.triggers.spark"),
        "connection-types": CONNECTION_TYPES,
        "extra-links": ["airflow_delay_provider.links.DelayedMessageLink"],
        "task-decorators": [
            {
                "name": "schedule_message",
                "class-name": "airflow_delay_provider.decorators.message.schedule_message_task",
            }
        ],
        "cli": ["airflow_delay_provider.cli.definition.get_delay_cli_commands"],
        "config": {"delay": {"description": "Delayed and scheduled messages.", "options": _OPTIONS}},
    }


def _modules(*names: str) -> list[dict[str, Any]]:
    return [{"integration-name": _INTEGRATION, "python-modules": list(names)}]


def _option(kind: str, description: str, *, example: str | None = None, default: str | None = None) -> dict[str, Any]:
    return {
        "description": description,
        "version_added": _VERSION,
        "type": kind,
        "example": example,
        "default": default,
    }


_OPTIONS = {
    "ledger_url": _option(
        "string",
        "Database of the ledger. Empty is a SQLite file delay.db in Airflow's home, which is refused where tasks run on"
        " other machines; use PostgreSQL in production.",
        example="postgresql+psycopg://user:password@host/delay",
        default="",
    )
    | {"sensitive": True},
    "journal_poll_interval": _option(
        "float", "Seconds between two looks of a triggerer for news of awaited messages.", default="0.2"
    ),
    "sensor_max_bytes": _option(
        "integer",
        "Most payload bytes of one channel that a triggerer has in memory for its sensors.",
        default="16777216",
    ),
    "dispatcher_batch": _option("integer", "Most messages that a dispatcher moves in one transaction.", default="1000"),
    "dispatcher_poll_interval": _option(
        "float", "Seconds after which a dispatcher notices a message that was scheduled just now.", default="0.02"
    ),
    "dispatcher_rate_limit": _option(
        "float",
        "Most messages of the ledger a second that one dispatcher hands over; 0 is no limit. What it moves on ladders"
        " (climb_connections) is not limited.",
        example="500",
        default="0",
    ),
    "dispatcher_health_host": _option(
        "string", "Where a dispatcher answers /health and /metrics.", default="127.0.0.1"
    ),
    "dispatcher_health_port": _option(
        "integer", "Port of /health and /metrics; 0 is any free port, -1 is no HTTP.", default="8795"
    ),
    "project_connections": _option(
        "string",
        "Connections whose brokers hold messages themselves and that a dispatcher follows, so that those messages can"
        " be listed; separated by commas.",
        example="rabbitmq_default",
        default="",
    ),
    "climb_connections": _option(
        "string",
        "Connections of Kafka on whose ladders a dispatcher moves waiting messages on; separated by commas.",
        example="delay_kafka_default",
        default="",
    ),
    "dispatcher_instance": _option(
        "string",
        "A name that only this dispatcher has, also after a restart: it then takes up its ladders at once instead of"
        " after a time-out. Empty is a new name at each start.",
        example="dispatcher-1",
        default="",
    ),
    "spark_submissions_per_second": _option(
        "float", "How many failed Spark jobs a second are submitted again to one cluster.", default="1.0"
    ),
    "spark_submission_burst": _option(
        "integer", "How many of them may be submitted at once after a quiet time.", default="5"
    ),
    "retention_days": _option("float", "Days for which messages that ended are kept.", default="30"),
}
