"""A thread that asks the broker for channels and for the ladder itself, so that a dispatcher never waits for that."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError
from confluent_kafka.admin import AclOperation

from airflow_delay_provider.brokers.kafka import administering
from airflow_delay_provider.brokers.kafka.destinations import Facts
from airflow_delay_provider.brokers.kafka.errors import DENIED, MISSING
from airflow_delay_provider.brokers.kafka.link import Link

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_delay_provider.brokers.kafka.administering import LadderTopic
    from airflow_delay_provider.brokers.kafka.config import KafkaConfig

log = logging.getLogger(__name__)

#: Between two looks at the channels that are in use, at their settings, and at the ladder.
LOOK_SECONDS = 0.25
SETTINGS_SECONDS = 1.0
LADDER_SECONDS = 3.0
#: A channel that cannot be used is asked for again after so long.
DOUBT_SECONDS = 5.0
#: A channel is missing if it still is so much later: nodes hear of a new topic one after the other.
MISSING_SECONDS = 0.1
#: How long a channel is asked for after it was used.
USED_SECONDS = 60.0
#: Most channels of one question, and most that are known at all.
MANY_CHANNELS = 500
MOST_CHANNELS = 20_000


class Watch:
    """What it has seen last is replaced as a whole, so that others may read it at any time."""

    def __init__(self, config: KafkaConfig) -> None:
        self._link = Link(config)
        #: The channels that are in use.
        self.channels: Mapping[str, Facts] = {}
        #: The topics of the ladder, None before the first look.
        self.ladder: Mapping[str, LadderTopic] | None = None
        self._wanted: dict[str, float] = {}
        self._looked_at: dict[str, float] = {}
        self._settings: dict[str, tuple[float, Mapping[str, str] | None]] = {}
        self._missing_since: dict[str, float] = {}
        self._ladder_at = 0.0
        #: How many channels are asked for at once: fewer after a question that was not answered.
        self._together = MANY_CHANNELS
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="delay-kafka-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(self._link.ask_seconds)

    def want(self, channel: str) -> None:
        """Ask for a channel while it is used."""
        is_new = channel not in self._wanted
        self._wanted[channel] = time.monotonic()
        if is_new:
            self._wake.set()

    def look_now(self) -> None:
        """Do not wait for the next look."""
        self._wake.set()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            pause = LOOK_SECONDS
            try:
                pause = self._look_at_channels()
                if time.monotonic() > self._ladder_at + LADDER_SECONDS:
                    self.ladder = administering.ladder_topics(self._link)
                    self._ladder_at = time.monotonic()
            except Exception as error:  # noqa: BLE001 - the broker may be gone for a while; what is known is kept
                log.debug("Channels cannot be looked at now: %s", error)
            self._wake.wait(pause)
            self._wake.clear()
        self._link.close()

    def _look_at_channels(self) -> float:
        """Look at those whose time has come, and return how long there is nothing to look at."""
        now = time.monotonic()
        self._forget_unused(now)
        names = [each for each in list(self._wanted) if self._is_due(each, now)]
        # Those that were asked for in vain come last, so that no name keeps others from being looked at.
        names = sorted(names, key=lambda each: self._looked_at.get(each, 0.0))[: self._together]
        if names:
            self._looked_at.update(dict.fromkeys(names, now))
            self._together = max(1, self._together // 2)
            seen = administering.describe(self._link, names)
            self._together = min(MANY_CHANNELS, 4 * self._together)
            self._read_settings([each for each in names if not isinstance(seen[each], KafkaError)])
            changes = {name: self._facts(name, seen[name]) for name in names}
            channels = {name: facts for name, facts in self.channels.items() if name in self._wanted}
            channels |= {name: facts for name, facts in changes.items() if facts is not None}
            for name in changes.keys() & channels.keys():
                if changes[name] is None:
                    del channels[name]
            self.channels = channels
        return MISSING_SECONDS if self._missing_since.keys() & set(names) else LOOK_SECONDS

    def _is_due(self, name: str, now: float) -> bool:
        looked_at = self._looked_at.get(name)
        if looked_at is None or name in self._missing_since:
            return True
        facts = self.channels.get(name)
        return now > looked_at + (DOUBT_SECONDS if facts is not None and facts.refusal else LOOK_SECONDS / 2)

    def _forget_unused(self, now: float) -> None:
        wanted = list(self._wanted.items())
        too_many = max(0, len(wanted) - MOST_CHANNELS)
        for name in [name for index, (name, at) in enumerate(wanted) if index < too_many or now > at + USED_SECONDS]:
            for known in (self._wanted, self._looked_at, self._settings, self._missing_since):
                known.pop(name, None)

    def _read_settings(self, names: list[str]) -> None:
        now = time.monotonic()
        old = [each for each in names if now > self._settings.get(each, (0.0, None))[0] + SETTINGS_SECONDS]
        for name, settings in administering.readable_settings(self._link, old).items():
            self._settings[name] = (now, settings)

    def _facts(self, name: str, seen: Any) -> Facts | None:
        """Return what is known of a channel; None is nothing yet."""
        if isinstance(seen, KafkaError):
            if seen.code() in MISSING:
                since = self._missing_since.setdefault(name, time.monotonic())
                if time.monotonic() < since + MISSING_SECONDS:
                    return None
                self._missing_since.pop(name, None)
                return Facts(refusal=f"topic {name}: {seen.str()}")
            if seen.code() in DENIED | {KafkaError.TOPIC_EXCEPTION}:
                return Facts(refusal=f"topic {name}: {seen.str()}")
            return Facts(trouble=f"topic {name}: {seen.str()}")
        self._missing_since.pop(name, None)
        if seen.authorized_operations and AclOperation.WRITE not in seen.authorized_operations:
            return Facts(refusal=f"topic {name}: the dispatcher's user {self._link.config.user} may not write to it")
        if seen.is_internal:
            return Facts(refusal=f"topic {name} is one of Kafka's own")
        settings = self._settings.get(name, (0.0, None))[1] or {}
        return Facts(trouble=_trouble(name, seen, settings), **_limits(settings))


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
