"""Schedules rows, some of them bad, and shows all that Spark shows of it: ``schedule_and_show.py PLAN FOLDER``.

PLAN is a JSON list of options of writes, each with whether it fails. Plans and pages of the UI go into FOLDER.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import urllib.request
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

PAGES = (
    "jobs/",
    "stages/",
    "stages/stage/?id=0&attempt=0",
    "storage/",
    "environment/",
    "executors/",
    "executors/threadDump/?executorId=driver",
    "SQL/",
    *(f"SQL/execution/?id={number}" for number in range(4)),
    "api/v1/applications/{app}/environment",
    "api/v1/applications/{app}/jobs",
    "api/v1/applications/{app}/sql?details=true&planDescription=true&length=100",
)

spark = SparkSession.builder.getOrCreate()
folder = Path(sys.argv[2])
rows = spark.range(0, 20, 1, 2).select(
    sf.col("id").cast("string").alias("payload"),
    sf.lit("2020-01-01T00:00:00Z").alias("deliver_at"),
    sf.when(sf.col("id") == 7, 999).otherwise(1).cast("int").alias("priority"),
)
failures = []
for options in json.loads(Path(sys.argv[1]).read_text()):
    try:
        rows.write.format("delay").mode("append").options(**options).save()
    except Exception as error:  # noqa: BLE001 - all of its text is searched
        print(error)
        failures.append(str(error))
(folder / "failures.json").write_text(json.dumps(failures))
with contextlib.redirect_stdout(io.StringIO()) as plan:
    rows.explain("extended")
(folder / "plan.txt").write_text(plan.getvalue())
for number, page in enumerate(PAGES):
    url = f"{spark.sparkContext.uiWebUrl}/{page.format(app=spark.sparkContext.applicationId)}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        (folder / f"page-{number}.html").write_bytes(answer.read())
spark.stop()
