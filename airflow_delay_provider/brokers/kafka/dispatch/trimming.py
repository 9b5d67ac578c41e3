"""Deletes records that all messages have left, so that the ladder contains little more than waiting messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from confluent_kafka import KafkaException, TopicPartition

from airflow_delay_provider.brokers.kafka.client import DENIED, KafkaClients, code_of
from airflow_delay_provider.brokers.kafka.reader import PartitionId

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0
STOP_SECONDS = 5.0


class Trimmer:
    """Asks the broker every few seconds, without waiting for it, to delete records before the committed offsets.

    If the offsets of the group are ever lost, a dispatcher starts with the first record left, so little is repeated.
    """

    def __init__(self, clients: KafkaClients) -> None:
        self._clients = clients
        self._wanted: dict[PartitionId, int] = {}
        self._asked_at = time.monotonic()
        self._answers: list[Future[Any]] = []
        self._is_denied = False

    def note(self, committed: Iterable[tuple[str, int, int]]) -> None:
        """Learn the first offset of each partition (topic, number, offset) that is not done."""
        for topic, partition, offset in committed:
            self._wanted[topic, partition] = offset

    def trim(self, *, now: bool = False) -> None:
        """Ask when it is time; with ``now`` ask at once, and wait a while for the answers."""
        if not now and time.monotonic() < self._asked_at + INTERVAL_SECONDS:
            return
        self._asked_at = time.monotonic()
        self._read_answers(STOP_SECONDS if now else 0.0)
        wanted, self._wanted = self._wanted, {}
        if not wanted or self._is_denied:
            return
        done = [TopicPartition(topic, partition, offset) for (topic, partition), offset in wanted.items()]
        self._answers = list(self._clients.admin().delete_records(done).values())
        if now:
            self._read_answers(STOP_SECONDS)

    def _read_answers(self, seconds: float) -> None:
        failed, deadline = False, time.monotonic() + seconds
        for answer in self._answers:
            try:
                answer.result(timeout=max(0.0, deadline - time.monotonic()))
            except KafkaException as error:
                failed = True
                self._note_refusal(error)
            except TimeoutError:
                log.debug("The broker has not deleted the records yet")
        self._answers = []
        if failed and not self._is_denied:
            self._clients.look_for_leaders()

    def _note_refusal(self, error: KafkaException) -> None:
        if code_of(error) in DENIED and not self._is_denied:
            self._is_denied = True
            log.warning(
                "%s: user %s may not DELETE records, so old records stay on disk; grant it on topics that begin"
                " with %s",
                self._clients.config.name,
                self._clients.config.user,
                self._clients.config.topology.prefix,
            )
