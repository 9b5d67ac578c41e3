"""The hook for connections of type ``delay_kafka``."""

from __future__ import annotations

from airflow_delay_provider.hooks.delay import DelayHook


class KafkaHook(DelayHook):
    """Schedule, send, control and consume messages over a Kafka connection; see :class:`DelayHook`.

    :param delay_conn_id: connection of type ``delay_kafka``, or ``kafka`` of Airflow's own Kafka provider; by default
        ``delay_kafka_default``.
    :param hold: ``broker`` or ``ledger``: what stores messages until they are due. By default the connection decides.
    """

    default_conn_name = "delay_kafka_default"
    conn_type = "delay_kafka"
    hook_name = "Kafka (delayed messages)"
