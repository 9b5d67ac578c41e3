"""Count orders by state; executors read them as JSON lines over HTTP. Argument: the URL."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from urllib.request import urlopen

from pyspark.sql import SparkSession

TIMEOUT_SECONDS = 10


def read_orders(url: str) -> Iterator[tuple[int, str]]:
    with urlopen(url, timeout=TIMEOUT_SECONDS) as lines:  # noqa: S310 - the user who starts the DAG chooses the source
        for line in lines:
            order = json.loads(line)
            yield order["id"], order["state"]


if __name__ == "__main__":
    spark = SparkSession.builder.appName("count_orders").getOrCreate()
    sources = spark.sparkContext.parallelize(sys.argv[1:])
    orders = spark.createDataFrame(sources.flatMap(read_orders), "id long, state string")
    for row in orders.groupBy("state").count().orderBy("state").collect():
        print(f"orders {row['state']}: {row['count']}", flush=True)
    spark.stop()
