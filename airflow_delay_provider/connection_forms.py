"""The forms of our connections in Airflow's UI; importing them costs nothing."""

from __future__ import annotations

from typing import Any


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

_LEDGER_URL = _field(
    "string", "Ledger URL", "The ledger for hold=ledger; empty is [delay] ledger_url.", format="password"
)

_DELAY = {
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

_RABBITMQ = {
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
        "ledger_url": _LEDGER_URL,
        "tick": _field(
            "number", "Tick (seconds)", "Delays are rounded up to it; empty is 1 second.", exclusiveMinimum=0
        ),
        "prefix": _field(
            "string", "Prefix", "What the names of the ladder begin with, one for each tenant; empty is delay."
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

_KAFKA = {
    "connection-type": "delay_kafka",
    "hook-class-name": "airflow_delay_provider.hooks.kafka.KafkaHook",
    "hook-name": "Kafka (delayed messages)",
    "ui-field-behaviour": {
        "hidden-fields": ["schema"],
        "relabeling": {"host": "Bootstrap servers"},
        "placeholders": {
            "host": "kafka1:9092,kafka2:9092",
            "port": "9092",
            "login": "for SASL: PLAIN over TLS, unless the fields below say otherwise",
        },
    },
    "conn-fields": {
        "hold": _field(
            "string",
            "Who holds messages",
            "broker: topics of Kafka, which a dispatcher with --climb moves them through; ledger: the ledger.",
            enum=["broker", "ledger"],
            default="broker",
        ),
        "ledger_url": _LEDGER_URL,
        "ladder": _field("string", "Ladder", "Name of the topics in which messages wait; several stand side by side."),
        "partitions": _field(
            "integer",
            "Partitions",
            "How many dispatchers can share the work; fixed once the topics exist; empty is 4.",
            minimum=1,
            maximum=1000,
        ),
        "replication_factor": _field(
            "integer", "Replication factor", "Copies of each topic; empty is the broker's default.", minimum=1
        ),
        "radix": _field(
            "integer", "Radix", "More means more topics and fewer rests on the way; empty is 4.", minimum=2, maximum=64
        ),
        "journal_days": _field(
            "number", "Journal age (days)", "How long the journal is kept; empty is 7.", exclusiveMinimum=0
        ),
        "consumer_group": _field(
            "string", "Consumer group", "Consumers of a channel are this group; empty is airflow-delay."
        ),
        "confirm_timeout": _field(
            "number",
            "Confirm timeout (seconds)",
            "How long the broker may take to confirm, and a dispatcher to answer; empty is 30.",
            exclusiveMinimum=0,
        ),
        # With dots: settings of the client library, in its own words.
        "security.protocol": _field(
            "string",
            "Security protocol",
            "Empty is SASL_SSL with a login, SSL with one of the files below, and PLAINTEXT otherwise.",
            examples=["SASL_SSL", "SSL", "SASL_PLAINTEXT", "PLAINTEXT"],
        ),
        "sasl.mechanism": _field(
            "string",
            "SASL mechanism",
            "How login and password are sent; empty is PLAIN.",
            examples=["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"],
        ),
        "ssl.ca.location": _field("string", "CA file", "Trusted certificates; empty is what this machine trusts."),
        "ssl.certificate.location": _field(
            "string", "Client certificate", "File of the certificate shown to the server."
        ),
        "ssl.key.location": _field("string", "Client key", "File of its private key."),
        **_LIMITS,
    },
}

CONNECTION_TYPES = [_DELAY, _RABBITMQ, _KAFKA]
