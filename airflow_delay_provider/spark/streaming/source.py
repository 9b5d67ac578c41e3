"""The options with which Spark reads the topics of a ladder."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.reader import PartitionId


def source_options(
    config: KafkaConfig, partitions: Sequence[PartitionId], starts: Mapping[PartitionId, int]
) -> dict[str, str]:
    """Return the options of Spark's Kafka source."""
    offsets: dict[str, dict[str, int]] = defaultdict(dict)
    for topic, partition in partitions:
        # -2 is the first record.
        offsets[topic][str(partition)] = starts.get((topic, partition), -2)
    return {
        "kafka.bootstrap.servers": str(config.client["bootstrap.servers"]),
        "kafka.isolation.level": "read_committed",
        "groupIdPrefix": f"{config.topology.prefix}.spark.source",
        "subscribe": ",".join(sorted(offsets)),
        "startingOffsets": json.dumps(offsets),
        "includeHeaders": "true",
        "failOnDataLoss": "true",
    }
