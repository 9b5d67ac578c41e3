"""What the broker says about the channels of due messages, asked once for all channels of a transaction."""

from __future__ import annotations

import time
from collections.abc import Iterable

from confluent_kafka import KafkaError

from airflow_delay_provider.brokers.kafka import admin
from airflow_delay_provider.brokers.kafka.client import MISSING, KafkaClients
from airflow_delay_provider.brokers.kafka.dispatch.channel_status import (
    AVAILABLE,
    MANY_CHANNELS,
    MISSING_SECONDS,
    ChannelCheck,
    ChannelDescription,
    ChannelStatus,
    describe_channel,
)
from airflow_delay_provider.brokers.kafka.dispatch.channels import check_description
from airflow_delay_provider.brokers.kafka.wire import Envelope

#: How long a description is used.
KNOWN_SECONDS = 2.0


class ChannelFacts:
    """Descriptions of channels, kept for a moment."""

    def __init__(self, clients: KafkaClients) -> None:
        self._clients = clients
        self._compresses = str(clients.config.client.get("compression.type", "none")) != "none"
        self._known: dict[str, tuple[float, ChannelDescription]] = {}

    def learn(self, channels: Iterable[str]) -> None:
        """Describe those that are not known."""
        now = time.monotonic()
        names = sorted(each for each in channels if self._known.get(each, (0.0, None))[0] < now)
        for start in range(0, len(names), MANY_CHANNELS):
            self._describe(names[start : start + MANY_CHANNELS])

    def forget(self) -> None:
        """Ask again: a channel has refused a message."""
        self._known.clear()

    def check(self, envelope: Envelope) -> ChannelCheck:
        """Return whether a message can be written to its channel, as far as the broker tells."""
        _, facts = self._known[envelope.channel]
        found = check_description(envelope.channel, facts, envelope, compresses=self._compresses)
        return AVAILABLE if found.status is ChannelStatus.UNKNOWN else found

    def max_bytes_of(self, channel: str) -> int | None:
        """Return how many bytes a channel accepts at once; None is unknown."""
        return self._known[channel][1].max_message_bytes

    def _describe(self, names: list[str]) -> None:
        seen = admin.describe(self._clients, names)
        missing = [each for each in names if isinstance(seen[each], KafkaError) and seen[each].code() in MISSING]
        if missing:
            # Nodes learn of a new topic one after the other.
            time.sleep(MISSING_SECONDS)
            seen |= admin.describe(self._clients, missing)
        there = [each for each in names if not isinstance(seen[each], KafkaError)]
        settings = admin.readable_settings(self._clients, there)
        until = time.monotonic() + KNOWN_SECONDS
        for name in names:
            facts = describe_channel(name, seen[name], settings.get(name) or {}, user=self._clients.config.user)
            self._known[name] = (until, facts)
