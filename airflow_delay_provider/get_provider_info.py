"""Describes this package to Airflow, which reads it at every start; so it imports nothing."""

from __future__ import annotations

from typing import Any

from airflow_delay_provider.connection_forms import CONNECTION_TYPES

_INTEGRATION = "Delayed messages"
_VERSION = "0.1.0"


def get_provider_info() -> dict[str, Any]:
    """Return the description of this provider, as Airflow's ``provider_info.schema.json`` defines it."""
    return {
        "package-name": "airflow-delay-provider",
        "name": "Delay",
        "description": "Delayed and scheduled messages: never early, never lost, no worker slot waiting.",
        "integrations": [{"integration-name": _INTEGRATION, "tags": ["software"]}],
        "hooks": _modules(
            "airflow_delay_provider.hooks.delay",
            "airflow_delay_provider.hooks.rabbitmq",
            "airflow_delay_provider.hooks.kafka",
            "airflow_delay_provider.spark.process.submit",
        ),
        "operators": _modules(
            "airflow_delay_provider.operators.schedule",
            "airflow_delay_provider.operators.control",
            "airflow_delay_provider.operators.spark",
        ),
        "sensors": _modules("airflow_delay_provider.sensors.message", "airflow_delay_provider.sensors.spark"),
        "triggers": _modules("airflow_delay_provider.triggers.message", "airflow_delay_provider.triggers.spark"),
        "connection-types": CONNECTION_TYPES,
        "extra-links": ["airflow_delay_provider.links.DelayedMessageLink"],
        "task-decorators": [
            {
                "name": "schedule_message",
                "class-name": "airflow_delay_provider.decorators.schedule.schedule_message_task",
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
        "Database URL of the ledger. The default is the SQLite file delay.db in Airflow's home, which is refused if"
        " tasks run on other machines. Use PostgreSQL in production.",
        example="postgresql+psycopg://user:password@host/delay",
        default="",
    )
    | {"sensitive": True},
    "journal_poll_interval": _option("float", "Journal polling interval of the triggerer, in seconds.", default="0.2"),
    "sensor_max_bytes": _option(
        "integer",
        "Maximum payload bytes of one channel that a triggerer keeps in memory for its sensors.",
        default="16777216",
    ),
    "dispatcher_batch": _option(
        "integer", "Maximum number of messages that a dispatcher handles in one transaction.", default="1000"
    ),
    "dispatcher_poll_interval": _option(
        "float",
        "Polling interval of the dispatcher, in seconds. A new message is noticed after at most this time, and on"
        " PostgreSQL at once.",
        default="0.02",
    ),
    "dispatcher_rate_limit": _option(
        "float",
        "Maximum number of ledger messages that one dispatcher dispatches per second; 0 means no limit. Does not apply"
        " to kafka_connections.",
        example="500",
        default="0",
    ),
    "dispatcher_health_host": _option(
        "string", "Address of the dispatcher's /health and /metrics.", default="127.0.0.1"
    ),
    "dispatcher_health_port": _option(
        "integer",
        "Port of the dispatcher's /health and /metrics; 0 means any free port, -1 no HTTP. If the default is taken, one"
        " of the next nine is used.",
        default="8795",
    ),
    "index_connections": _option(
        "string",
        "Connections whose journals the dispatcher copies into the ledger, so that messages held by their brokers can"
        " be listed. Separate them with commas.",
        example="rabbitmq_default",
        default="",
    ),
    "kafka_connections": _option(
        "string",
        "Kafka connections whose delayed messages the dispatcher delivers. Separate them with commas.",
        example="delay_kafka_default",
        default="",
    ),
    "dispatcher_instance": _option(
        "string",
        "Unique name of this dispatcher that survives restarts. With it, kafka_connections continue at once after a"
        " restart instead of after a time-out. By default each start gets a new name.",
        example="dispatcher-1",
        default="",
    ),
    "spark_submissions_per_second": _option(
        "float", "Maximum number of retried Spark jobs per second that are submitted to one cluster.", default="1.0"
    ),
    "spark_submission_burst": _option(
        "integer", "Maximum number of retried Spark jobs that are submitted at once after a quiet time.", default="5"
    ),
    "show_payloads": _option(
        "boolean", "Whether the UI and the HTTP API show payloads, with secrets masked.", default="True"
    ),
    "shown_payload_bytes": _option(
        "integer", "How many bytes of a payload the UI and the HTTP API show.", default="65536"
    ),
    "retention_days": _option("float", "Days for which the ledger keeps finished messages.", default="30"),
}
