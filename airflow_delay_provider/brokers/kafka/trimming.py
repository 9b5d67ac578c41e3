"""Records that every message has left are removed, so that the ladder holds what waits and little more."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException, TopicPartition

from airflow_delay_provider.brokers.kafka.errors import DENIED, code_of

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.kafka.link import Link
    from airflow_delay_provider.brokers.kafka.reading import Partition

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0
STOP_SECONDS = 5.0


class Trimmer:
    """Asks the broker, now and then and without waiting for it, to remove what lies before the committed offsets.

    Should the group's memory ever be lost, a dispatcher begins with the first record there is: little is done twice.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._wanted: dict[Partition, int] = {}
        self._asked_at = time.monotonic()
        self._answers: list[Future[Any]] = []
        self._is_denied = False

    def note(self, committed: Iterable[tuple[str, int, int]]) -> None:
        """Note up to where (topic, lane, offset) everything is done."""
        for topic, lane, offset in committed:
            self._wanted[topic, lane] = offset

    def trim(self, *, now: bool = False) -> None:
        """Ask when it is time, or ``now``, and then wait for the answers for a while."""
        if not now and time.monotonic() < self._asked_at + INTERVAL_SECONDS:
            return
        self._asked_at = time.monotonic()
        self._look_at_answers(STOP_SECONDS if now else 0.0)
        wanted, self._wanted = self._wanted, {}
        if not wanted or self._is_denied:
            return
        places = [TopicPartition(topic, lane, offset) for (topic, lane), offset in wanted.items()]
        self._answers = list(self._link.admin().delete_records(places).values())
        if now:
            self._look_at_answers(STOP_SECONDS)

    def _look_at_answers(self, seconds: float) -> None:
        failed, deadline = False, time.monotonic() + seconds
        for answer in self._answers:
            try:
                answer.result(timeout=max(0.0, deadline - time.monotonic()))
            except KafkaException as error:
                failed = True
                self._note_refusal(error)
            except TimeoutError:
                log.debug("The broker takes its time to remove records")
        self._answers = []
        if failed and not self._is_denied:
            self._link.look_for_leaders()

    def _note_refusal(self, error: KafkaException) -> None:
        if code_of(error) in DENIED and not self._is_denied:
            self._is_denied = True
            log.warning(
                "%s: user %s may not DELETE records, so what messages have left stays on disk; grant it on topics"
                " that begin with %s",
                self._link.config.name,
                self._link.config.user,
                self._link.config.topology.prefix,
            )
