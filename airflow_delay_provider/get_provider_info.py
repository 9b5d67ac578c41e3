"""What Airflow learns of this package at every start; importing it costs nothing."""

from __future__ import annotations

from typing import Any

_INTEGRATION = "Delayed messages"
_VERSION = "0.1.0"


def get_provider_info() -> dict[str, Any]:
    """Return the provider description, in the form of Airflow's ``provider_info.schema.json``."""
    return {
        "package-name": "airflow-delay-provider",
        "name": "Delay",
        "description": "Delayed and scheduled messages: never early, never lost, no worker slot waiting.",
        "integrations": [{"integration-name": _INTEGRATION, "tags": ["software"]}],
        "hooks": _modules("airflow_delay_provider.hooks.delay", "airflow_delay_provider.hooks.rabbitmq"),
        "operators": _modules("airflow_delay_provider.operators.message"),
        "sensors": _modules("airflow_delay_provider.sensors.message"),
        "triggers": _modules("airflow_delay_provider.triggers.message"),
        "connection-types": [_DELAY_CONNECTION, _RABBITMQ_CONNECTION],
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
        "Database of the ledger. Empty is a SQLite file delay.db in Airflow's home; use PostgreSQL in production.",
        example="postgresql+psycopg://user:password@host/delay",
        default="",
    )
    | {"sensitive": True},
    "journal_poll_interval": _option(
        "float", "Seconds between two looks of a triggerer for news of awaited messages.", default="0.2"
    ),
    "dispatcher_batch": _option("integer", "Most messages that a dispatcher moves in one transaction.", default="1000"),
    "dispatcher_poll_interval": _option(
        "float", "Seconds after which a dispatcher notices a message that was scheduled just now.", default="0.02"
    ),
    "dispatcher_rate_limit": _option(
        "float", "Most messages a second that one dispatcher hands over; 0 is no limit.", example="500", default="0"
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
    "retention_days": _option("float", "Days for which messages that ended are kept.", default="30"),
}


def _field(kind: str, label: str, description: str, **schema: Any) -> dict[str, Any]:
    return {"label": label, "description": description, "schema": {"type": [kind, "null"], **schema}}


_LIMITS = {
    "min_delay": _field(
        "number", "Minimum delay (seconds)", "Messages due sooner are refused; 0 accepts all.", minimum=0
    ),
    "max_delay": _field(
        "number", "Maximum delay (seconds)", "Messages due later are refused; empty is ten years.", minimum=0
    ),
    "max_payload_bytes": _field(
        "integer", "Maximum payload (bytes)", "Larger messages are refused; empty is 1 MiB.", minimum=1
    ),
}

_DELAY_CONNECTION = {
    "connection-type": "delay",
    "hook-class-name": "airflow_delay_provider.hooks.delay.DelayHook",
    "hook-name": "Delayed messages (embedded)",
    "ui-field-behaviour": {
        "hidden-fields": [],
        "relabeling": {"schema": "Database"},
        "placeholders": {
            "host": "PostgreSQL host; empty for the ledger of [delay] ledger_url",
            "port": "5432",
            "schema": "database of the ledger",
        },
    },
    "conn-fields": {
        "ledger_url": _field(
            "string", "Ledger URL", "A database URL instead of host, port, login and database.", format="password"
        ),
        **_LIMITS,
    },
}

_RABBITMQ_CONNECTION = {
    "connection-type": "rabbitmq",
    "hook-class-name": "airflow_delay_provider.hooks.rabbitmq.RabbitMQHook",
    "hook-name": "RabbitMQ (delayed messages)",
    "ui-field-behaviour": {
        "hidden-fields": [],
        "relabeling": {"schema": "Virtual host"},
        "placeholders": {"host": "one host, or several: rabbit1,rabbit2:5673", "port": "5672", "schema": "/"},
    },
    "conn-fields": {
        "hold": _field(
            "string",
            "Who holds messages",
            "broker: RabbitMQ itself; ledger: the ledger, so that messages can be cancelled and moved.",
            enum=["broker", "ledger"],
            default="broker",
        ),
        "ledger_url": _field(
            "string", "Ledger URL", "The ledger for hold=ledger; empty is [delay] ledger_url.", format="password"
        ),
        "queue_type": _field(
            "string",
            "Queue type",
            "quorum keeps messages when the broker dies; classic needs less CPU and may lose some.",
            enum=["quorum", "classic"],
            default="quorum",
        ),
        "tick": _field(
            "number", "Tick (seconds)", "Delays are rounded up to it; empty is 1 second.", exclusiveMinimum=0
        ),
        "max_length": _field(
            "integer", "Maximum length", "Most messages in one queue of the ladder; above it, refused.", minimum=1
        ),
        "journal": _field(
            "boolean", "Journal", "Record schedules and dispatches; tasks that wait need it.", default=True
        ),
        "journal_max_age": _field("string", "Journal age", "How long the journal is kept; empty is 7D."),
        "ssl": _field("boolean", "TLS", "Speak TLS; on anyway when one of the next four is given."),
        "ca_file": _field("string", "CA file", "Trusted certificates; empty is what this machine trusts."),
        "cert_file": _field("string", "Client certificate", "File of the certificate shown to the server."),
        "key_file": _field("string", "Client key", "File of its private key."),
        "server_name": _field("string", "Server name", "Name in the server's certificate, if it is not the host's."),
        "heartbeat": _field("integer", "Heartbeat (seconds)", "Empty is 60.", minimum=0, maximum=65_535),
        "connect_timeout": _field(
            "number", "Connect timeout (seconds)", "For each host; empty is 10.", exclusiveMinimum=0
        ),
        "confirm_timeout": _field(
            "number",
            "Confirm timeout (seconds)",
            "How long the broker may confirm nothing; empty is 60.",
            exclusiveMinimum=0,
        ),
        "management_url": _field(
            "string",
            "Management URL",
            "Where `airflow delay topology verify` looks at policies: http://user:password@host:15672",
            format="password",
        ),
        **_LIMITS,
    },
}
