"""The hook behind connections of type ``delay_kafka``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_delay_provider.hooks.delay import DelayHook

if TYPE_CHECKING:
    from airflow_delay_provider.domain.clock import Clock
    from airflow_delay_provider.domain.schedule import Hold

DEFAULT_KAFKA_CONN_ID = "delay_kafka_default"


class KafkaHook(DelayHook):
    """Schedule, send, control and consume messages over a Kafka connection; everything else is :class:`DelayHook`.

    :param delay_conn_id: a connection of type ``delay_kafka``, or of type ``kafka`` of Airflow's own Kafka provider.
    :param hold: who keeps the wait, ``broker`` or ``ledger``; None is what the connection says.
    """

    default_conn_name = DEFAULT_KAFKA_CONN_ID
    conn_type = "delay_kafka"
    hook_name = "Kafka (delayed messages)"

    def __init__(
        self,
        delay_conn_id: str = DEFAULT_KAFKA_CONN_ID,
        *,
        hold: Hold | str | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(delay_conn_id, hold=hold, clock=clock)
