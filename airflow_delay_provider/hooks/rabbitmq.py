"""The hook for connections of type ``rabbitmq``."""

from __future__ import annotations

from airflow_delay_provider.hooks.delay import DelayHook


class RabbitMQHook(DelayHook):
    """Schedule, send, control and consume messages over a RabbitMQ connection; see :class:`DelayHook`.

    :param delay_conn_id: connection of type ``rabbitmq``; by default ``rabbitmq_default``.
    :param hold: ``broker`` or ``ledger``: what stores messages until they are due. By default the connection decides.
    """

    default_conn_name = "rabbitmq_default"
    conn_type = "rabbitmq"
    hook_name = "RabbitMQ (delayed messages)"
