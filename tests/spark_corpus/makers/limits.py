"""Jobs that run out of something. Run as: limits.py FUNCTION."""

import resource
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it


def session():
    return SparkSession.builder.appName(sys.argv[1]).getOrCreate()


def heap():
    session().range(20_000_000).select(F.repeat(F.col("id").cast("string"), 50).alias("text")).collect()


def result_size():
    # Results travel packed: only what cannot be packed is large.
    session().range(200_000, numPartitions=1).select(F.sha2(F.col("id").cast("string"), 512)).collect()


def python_memory():
    def hoard(_):
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        return len(bytearray(4 << 30))

    session().sparkContext.parallelize([1], 1).map(hoard).collect()


def python_memory_on_driver():
    session()
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(4 << 30)


def broadcast():
    spark = session()
    large = spark.range(6_000_000).select("id", F.repeat(F.lit("x"), 60).alias("text"))
    spark.range(10).join(F.broadcast(large), "id").show()


def task_size():
    session().sparkContext.parallelize([bytes(3 << 20)], 1).count()


def device_full():
    def write(_):
        with open("/dev/full", "w") as device:
            device.write("orders")

    session().sparkContext.parallelize([1], 1).map(write).collect()


def shuffle_disk():
    frame = session().range(3_000_000).select("id", F.sha2(F.col("id").cast("string"), 512).alias("text"))
    frame.repartition(4, "text").write.format("noop").mode("overwrite").save()


def executor_heap():
    def hoard(rows):
        return [len("".join(str(row) for row in rows))]

    spark = session()
    text = F.repeat(F.col("id").cast("string"), 40_000_000)
    spark.range(0, 16, numPartitions=1).select(F.collect_list(text).alias("all")).select(F.size("all")).show()


globals()[sys.argv[1]]()
