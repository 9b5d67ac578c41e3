"""The status of channels, and a thread that describes them, so that the dispatcher never waits for that."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from confluent_kafka import KafkaError
from confluent_kafka.admin import AclOperation

from airflow_delay_provider.brokers.kafka import admin
from airflow_delay_provider.brokers.kafka.admin import LadderTopic
from airflow_delay_provider.brokers.kafka.client import DENIED, MISSING, UNFIT, KafkaClients
from airflow_delay_provider.brokers.kafka.config import KafkaConfig

log = logging.getLogger(__name__)

#: How often channels in use, their settings, and the ladder are described.
LOOK_SECONDS = 0.25
SETTINGS_SECONDS = 1.0
LADDER_SECONDS = 3.0
#: How often a channel is described that cannot be used.
DOUBT_SECONDS = 5.0
#: A channel is missing if it still is so much later: nodes learn of a new topic one after the other.
MISSING_SECONDS = 0.1
#: How long a channel is described after it was used.
USED_SECONDS = 60.0
#: Most channels in one request, and most that are watched.
MANY_CHANNELS = 500
MOST_CHANNELS = 20_000


class ChannelStatus(Enum):
    """Whether a message can be written to its channel."""

    AVAILABLE = auto()
    #: Not known yet; it will be in a moment.
    UNKNOWN = auto()
    #: Not now, and perhaps later.
    UNAVAILABLE = auto()
    #: Not at all.
    REFUSED = auto()


class ChannelCheck(NamedTuple):
    """The status of the channel for one message, and the reason."""

    status: ChannelStatus
    reason: str = ""


AVAILABLE = ChannelCheck(ChannelStatus.AVAILABLE)
#: A record was not stored because the transaction ended before; that says nothing about its channel.
PURGED = {
    KafkaError._PURGE_QUEUE,
    KafkaError._PURGE_INFLIGHT,
    KafkaError._STATE,
    KafkaError.INVALID_TXN_STATE,
    KafkaError.INVALID_PRODUCER_EPOCH,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelDescription:
    """What the broker says about a channel."""

    #: Why it cannot be written to, if a person has to change that.
    refusal: str | None = None
    #: Why it cannot be written to for now.
    trouble: str | None = None
    #: None if the settings may not be read.
    max_message_bytes: int | None = None
    is_compacted: bool = False
    #: The greatest age of a record that it accepts, None if not limited.
    most_age_ms: int | None = None


class ChannelWatch:
    """Describes channels and the ladder; results are replaced as a whole, so any thread may read them."""

    def __init__(self, config: KafkaConfig) -> None:
        self._clients = KafkaClients(config)
        #: The channels that are in use.
        self.channels: Mapping[str, ChannelDescription] = {}
        #: The topics of the ladder, None before the first description.
        self.ladder: Mapping[str, LadderTopic] | None = None
        self._watched: dict[str, float] = {}
        self._described_at: dict[str, float] = {}
        self._settings: dict[str, tuple[float, Mapping[str, str] | None]] = {}
        self._missing_since: dict[str, float] = {}
        self._ladder_at = 0.0
        #: Channels in one request: fewer after one that was not answered.
        self._together = MANY_CHANNELS
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="delay-kafka-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(self._clients.ask_seconds)

    def watch(self, channel: str) -> None:
        """Describe a channel while it is used."""
        is_new = channel not in self._watched
        self._watched[channel] = time.monotonic()
        if is_new:
            self._wake.set()

    def refresh_now(self) -> None:
        """Describe channels at once."""
        self._wake.set()

    def find_ladder_changes(self, topics: Mapping[str, LadderTopic]) -> list[str]:
        """Return topics of the ladder that were added, deleted, created again or extended, once for each change."""
        seen = self.ladder
        if seen is None or seen == topics:
            return []
        self.ladder = None
        return sorted(name for name in seen.keys() | topics if seen.get(name) != topics.get(name))

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            pause = LOOK_SECONDS
            try:
                pause = self._describe_channels()
                if time.monotonic() > self._ladder_at + LADDER_SECONDS:
                    self.ladder = admin.ladder_topics(self._clients)
                    self._ladder_at = time.monotonic()
            except Exception as error:  # noqa: BLE001 - the broker may be gone for a while; descriptions are kept
                log.debug("Channels cannot be described now: %s", error)
            self._wake.wait(pause)
            self._wake.clear()
        self._clients.close()

    def _describe_channels(self) -> float:
        """Describe the channels whose time has come, and return how long to wait."""
        now = time.monotonic()
        self._forget_unused(now)
        names = [each for each in list(self._watched) if self._is_due(each, now)]
        # Channels of failed requests come last, so that no name blocks others.
        names = sorted(names, key=lambda each: self._described_at.get(each, 0.0))[: self._together]
        if names:
            self._described_at.update(dict.fromkeys(names, now))
            self._together = max(1, self._together // 2)
            seen = admin.describe(self._clients, names)
            self._together = min(MANY_CHANNELS, 4 * self._together)
            self._read_settings([each for each in names if not isinstance(seen[each], KafkaError)])
            changes = {name: self._facts(name, seen[name]) for name in names}
            channels = {name: facts for name, facts in self.channels.items() if name in self._watched}
            channels |= {name: facts for name, facts in changes.items() if facts is not None}
            for name in changes.keys() & channels.keys():
                if changes[name] is None:
                    del channels[name]
            self.channels = channels
        return MISSING_SECONDS if self._missing_since.keys() & set(names) else LOOK_SECONDS

    def _is_due(self, name: str, now: float) -> bool:
        described_at = self._described_at.get(name)
        if described_at is None or name in self._missing_since:
            return True
        facts = self.channels.get(name)
        return now > described_at + (DOUBT_SECONDS if facts is not None and facts.refusal else LOOK_SECONDS / 2)

    def _forget_unused(self, now: float) -> None:
        wanted = list(self._watched.items())
        too_many = max(0, len(wanted) - MOST_CHANNELS)
        for name in [name for index, (name, at) in enumerate(wanted) if index < too_many or now > at + USED_SECONDS]:
            for known in (self._watched, self._described_at, self._settings, self._missing_since):
                known.pop(name, None)

    def _read_settings(self, names: list[str]) -> None:
        now = time.monotonic()
        old = [each for each in names if now > self._settings.get(each, (0.0, None))[0] + SETTINGS_SECONDS]
        for name, settings in admin.readable_settings(self._clients, old).items():
            self._settings[name] = (now, settings)

    def _facts(self, name: str, seen: Any) -> ChannelDescription | None:
        """Return the description of a channel; None is unknown."""
        if isinstance(seen, KafkaError) and seen.code() in MISSING:
            since = self._missing_since.setdefault(name, time.monotonic())
            if time.monotonic() < since + MISSING_SECONDS:
                return None
        self._missing_since.pop(name, None)
        settings = self._settings.get(name, (0.0, None))[1] or {}
        return describe_channel(name, seen, settings, user=self._clients.config.user)


def describe_channel(name: str, seen: Any, settings: Mapping[str, str], *, user: str) -> ChannelDescription:
    """Return what the library's description of a topic, or its error, and the topic's settings say."""
    if isinstance(seen, KafkaError):
        if seen.code() in MISSING | DENIED | {KafkaError.TOPIC_EXCEPTION}:
            return ChannelDescription(refusal=f"topic {name}: {seen.str()}")
        return ChannelDescription(trouble=f"topic {name}: {seen.str()}")
    if seen.authorized_operations and AclOperation.WRITE not in seen.authorized_operations:
        return ChannelDescription(refusal=f"topic {name}: the dispatcher's user {user} may not write to it")
    if seen.is_internal:
        return ChannelDescription(refusal=f"topic {name} is one of Kafka's own")
    return ChannelDescription(trouble=_trouble(name, seen, settings), **_limits(settings))


def _trouble(name: str, seen: Any, settings: Mapping[str, str]) -> str | None:
    in_sync = int(settings.get("min.insync.replicas", 1))
    for partition in seen.partitions:
        if partition.leader is None:
            return f"partition {partition.id} of topic {name} has no leader"
        if len(partition.isr) < in_sync:
            return f"partition {partition.id} of topic {name} has {len(partition.isr)} replicas in sync, not {in_sync}"
    return None


def _limits(settings: Mapping[str, str]) -> dict[str, Any]:
    if not settings:
        return {}
    is_own = settings.get("message.timestamp.type") == "CreateTime"
    most_age_ms = settings.get("message.timestamp.before.max.ms") if is_own else None
    return {
        "max_message_bytes": int(settings["max.message.bytes"]),
        "is_compacted": "compact" in settings["cleanup.policy"],
        "most_age_ms": None if most_age_ms is None else int(most_age_ms),
    }


def check_of(error: KafkaError) -> ChannelCheck:
    """Return what the error of one record says about its channel."""
    lasting = MISSING | DENIED | UNFIT | {KafkaError.TOPIC_EXCEPTION}
    if error.code() in lasting:
        return ChannelCheck(ChannelStatus.REFUSED, error.str())
    return ChannelCheck(ChannelStatus.UNAVAILABLE, error.str())
