"""Writes rows to the inbox of a Kafka ladder, and then everything that Spark shows of it to a folder."""

from __future__ import annotations

import re
import sys
import urllib.request
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from airflow_delay_provider.spark.kafka_sink import write_to_inbox

connection_file, channel, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
spark = SparkSession.builder.getOrCreate()
rows = spark.range(0, 1000, numPartitions=4).select(
    f.col("id").cast("string").alias("payload"),
    f.col("id").cast("string").alias("key"),
    f.lit("2030-01-31T17:00:00Z").alias("deliver_at"),
    f.when(f.col("id") == 7, 999).otherwise(1).alias("priority"),
)
for _ in range(2):
    report = write_to_inbox(
        rows,
        "stream",
        connection_file=connection_file,
        channel=channel,
        on_rejects="keep",
        rejects=str(folder / "rejects"),
    )
    print(f"report: {report}")

base = spark.sparkContext.uiWebUrl
pages = ["/jobs/", "/stages/", "/environment/", "/executors/", "/SQL/"]
sql = urllib.request.urlopen(f"{base}/SQL/", timeout=60).read().decode()
pages += [f"/SQL/execution/?id={number}" for number in sorted(set(re.findall(r"execution/\?id=(\d+)", sql)))]
api = f"/api/v1/applications/{spark.sparkContext.applicationId}"
pages += [f"{api}/environment", f"{api}/sql?details=true&planDescription=true"]
for number, page in enumerate(pages):
    content = urllib.request.urlopen(f"{base}{page}", timeout=60).read()
    (folder / f"page-{number}.html").write_bytes(page.encode() + b"\n" + content)
spark.stop()
