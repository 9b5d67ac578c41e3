"""Where a message waits in the state of the query: its shard, and the bucket of its due time. No I/O.

State is stored by shard and bucket. A bucket is a short span of time and has one timer, at its end, so no message is
early. Messages of one channel and key share a shard; a shard is written in the order of due times by one task.
"""

from __future__ import annotations

from dataclasses import dataclass

from airflow_delay_provider.domain.exceptions import ConfigurationError

#: Not a bucket of messages: frames that pass through to the sink at once.
PASSING = -1
#: Not a bucket of messages: what was read, and the time of the micro-batch.
CLOCK = -2
SHORTEST_BUCKET_MS = 50
LONGEST_BUCKET_MS = 3_600_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How many shards there are, and how long a bucket is; fixed for the life of a checkpoint."""

    shards: int = 4
    bucket_ms: int = 500

    def __post_init__(self) -> None:
        if not 1 <= self.shards <= 1000:
            raise ConfigurationError(f"--shards: {self.shards} is out of range; use 1 to 1000")
        if not SHORTEST_BUCKET_MS <= self.bucket_ms <= LONGEST_BUCKET_MS:
            raise ConfigurationError(
                f"--bucket: {self.bucket_ms} ms is out of range; use {SHORTEST_BUCKET_MS} to {LONGEST_BUCKET_MS} ms"
            )

    def bucket_of(self, due_ms: int) -> int:
        """Return the bucket of a due time, which lies at its end or before."""
        return -(-max(0, due_ms) // self.bucket_ms)

    def ends_ms(self, bucket: int) -> int:
        """Return when all messages of a bucket are due."""
        return bucket * self.bucket_ms

    def shard_of(self, order: int) -> int:
        """Return the shard of a message (see :func:`~airflow_delay_provider.brokers.kafka.wire.order_of`)."""
        return order % self.shards
