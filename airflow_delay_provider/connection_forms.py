"""The connection forms in Airflow's UI; Airflow reads them at every start, so this imports nothing."""

from __future__ import annotations

from typing import Any


def _field(kind: str, label: str, description: str, **schema: Any) -> dict[str, Any]:
    return {"label": label, "description": description, "schema": {"type": [kind, "null"], **schema}}


_LIMITS = {
    "min_delay": _field("number", "Minimum delay (seconds)", "Shorter delays are refused. Default: 0.", minimum=0),
    "max_delay": _field(
        "number", "Maximum delay (seconds)", "Longer delays are refused. Default: ten years.", minimum=0
    ),
    "max_payload_bytes": _field(
        "integer", "Maximum payload (bytes)", "Larger payloads are refused. Default: 1 MiB.", minimum=1
    ),
}

_LEDGER_URL = _field(
    "string", "Ledger URL", "Ledger for messages with hold=ledger. Default: [delay] ledger_url.", format="password"
)

_DELAY = {
    "connection-type": "delay",
    "hook-class-name": "airflow_delay_provider.hooks.delay.DelayHook",
    "hook-name": "Delayed messages (embedded)",
    "ui-field-behaviour": {
        "hidden-fields": [],
        "relabeling": {"schema": "Database"},
        "placeholders": {
            "host": "PostgreSQL host; leave empty to use [delay] ledger_url",
            "port": "5432",
            "schema": "ledger database",
        },
    },
    "conn-fields": {
        "ledger_url": _field(
            "string", "Ledger URL", "Database URL. Replaces host, port, login and database.", format="password"
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
        "placeholders": {"host": "one or more hosts: rabbit1,rabbit2:5673", "port": "5672", "schema": "/"},
    },
    "conn-fields": {
        "hold": _field(
            "string",
            "Hold",
            "What stores messages until they are due: broker (RabbitMQ) or ledger. With ledger, you can cancel and"
            " reschedule them. Default: broker.",
            enum=["broker", "ledger"],
            default="broker",
        ),
        "ledger_url": _LEDGER_URL,
        "tick": _field(
            "number", "Tick (seconds)", "Delays are rounded up to a multiple of this. Default: 1.", exclusiveMinimum=0
        ),
        "prefix": _field(
            "string", "Prefix", "First part of all queue and exchange names; use one for each tenant. Default: delay."
        ),
        "max_length": _field(
            "integer",
            "Maximum length",
            "Maximum number of messages in one queue of the ladder; more are refused. Default: no limit.",
            minimum=1,
        ),
        "journal": _field(
            "boolean",
            "Journal",
            "Record scheduled and dispatched messages. Tasks that wait for dispatch need it.",
            default=True,
        ),
        "journal_max_age": _field(
            "string", "Journal age", "How long the journal is kept, such as 12h or 30D. Default: 7D."
        ),
        "ssl": _field("boolean", "TLS", "Use TLS. Always on if you set one of the next four fields."),
        "ca_file": _field("string", "CA file", "Trusted certificates. Default: those of the operating system."),
        "cert_file": _field("string", "Client certificate", "File of the client's certificate."),
        "key_file": _field("string", "Client key", "File of the client's private key."),
        "server_name": _field(
            "string", "Server name", "Name in the server's certificate, if it differs from the host."
        ),
        "heartbeat": _field(
            "integer", "Heartbeat (seconds)", "Interval of AMQP heartbeats. Default: 60.", minimum=0, maximum=65_535
        ),
        "connect_timeout": _field(
            "number", "Connect timeout (seconds)", "Time-out for each host. Default: 10.", exclusiveMinimum=0
        ),
        "confirm_timeout": _field(
            "number",
            "Confirm timeout (seconds)",
            "How long to wait for the next confirmation of the broker. Default: 60.",
            exclusiveMinimum=0,
        ),
        "management_url": _field(
            "string",
            "Management URL",
            "Lets `airflow delay topology verify` check policies: http://user:password@host:15672",
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
            "login": "for SASL; PLAIN over TLS by default",
        },
    },
    "conn-fields": {
        "hold": _field(
            "string",
            "Hold",
            "What stores messages until they are due: broker (Kafka topics, needs a dispatcher with --kafka) or ledger."
            " Default: broker.",
            enum=["broker", "ledger"],
            default="broker",
        ),
        "ledger_url": _LEDGER_URL,
        "ladder": _field(
            "string", "Ladder", "Name of the set of topics that store delayed messages. One Kafka can have several."
        ),
        "partitions": _field(
            "integer",
            "Partitions",
            "Maximum number of dispatchers that share the work. Cannot be changed once the topics exist. Default: 4.",
            minimum=1,
            maximum=1000,
        ),
        "replication_factor": _field(
            "integer", "Replication factor", "Copies of each topic. Default: that of the broker.", minimum=1
        ),
        "radix": _field(
            "integer",
            "Radix",
            "A higher radix needs more topics and fewer moves for each message. Default: 4.",
            minimum=2,
            maximum=64,
        ),
        "journal_days": _field(
            "number", "Journal age (days)", "How long the journal is kept. Default: 7.", exclusiveMinimum=0
        ),
        "consumer_group": _field("string", "Consumer group", "Consumer group for channels. Default: airflow-delay."),
        "confirm_timeout": _field(
            "number",
            "Confirm timeout (seconds)",
            "How long to wait for the broker's confirmation, or for a dispatcher's reply. Default: 30.",
            exclusiveMinimum=0,
        ),
        # Names with dots are settings of the client library.
        "security.protocol": _field(
            "string",
            "Security protocol",
            "Default: SASL_SSL with a login, SSL with one of the files below, else PLAINTEXT.",
            examples=["SASL_SSL", "SSL", "SASL_PLAINTEXT", "PLAINTEXT"],
        ),
        "sasl.mechanism": _field(
            "string",
            "SASL mechanism",
            "How login and password are sent. Default: PLAIN.",
            examples=["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"],
        ),
        "ssl.ca.location": _field("string", "CA file", "Trusted certificates. Default: those of the operating system."),
        "ssl.certificate.location": _field("string", "Client certificate", "File of the client's certificate."),
        "ssl.key.location": _field("string", "Client key", "File of the client's private key."),
        **_LIMITS,
    },
}

CONNECTION_TYPES = [_DELAY, _RABBITMQ, _KAFKA]
