"""Filters of sensors: like those of users, they are in a module that workers and the triggerer can import."""

from __future__ import annotations

from airflow_delay_provider.domain.message import Message, decode_payload


def is_open(message: Message) -> bool:
    """Whether the payload says open."""
    return decode_payload(message.payload, message.content_type) == {"open": True}
