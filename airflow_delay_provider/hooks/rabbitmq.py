"""The hook behind connections of type ``rabbitmq``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_delay_provider.hooks.delay import DelayHook

if TYPE_CHECKING:
    from airflow_delay_provider.domain.clock import Clock
    from airflow_delay_provider.domain.schedule import Hold

DEFAULT_RABBITMQ_CONN_ID = "rabbitmq_default"


class RabbitMQHook(DelayHook):
    """Schedule, send, control and consume messages over a RabbitMQ connection; everything else is :class:`DelayHook`.

    :param delay_conn_id: a connection of type ``rabbitmq``.
    :param hold: who keeps the wait, ``broker`` or ``ledger``; None is what the connection says.
    """

    default_conn_name = DEFAULT_RABBITMQ_CONN_ID
    conn_type = "rabbitmq"
    hook_name = "RabbitMQ (delayed messages)"

    def __init__(
        self,
        delay_conn_id: str = DEFAULT_RABBITMQ_CONN_ID,
        *,
        hold: Hold | str | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(delay_conn_id, hold=hold, clock=clock)
