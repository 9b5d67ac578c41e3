"""Jobs whose query, settings or data are wrong. Run as: queries.py FUNCTION."""

import os
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it


def session():
    return SparkSession.builder.appName(sys.argv[1]).getOrCreate()


def column_missing():
    session().range(3).select("amount").show()


def table_missing():
    session().table("orders").show()


def parse_error():
    session().sql("selekt * from orders").show()


def path_missing():
    session().read.parquet("/nowhere/orders").show()


def output_exists():
    frame = session().range(3)
    frame.write.parquet("orders")
    frame.write.parquet("orders")


def output_not_writable():
    session().range(3).write.csv("/proc/orders")


def divide_by_zero():
    session().sql("select 1 / (id - id) from range(3)").show()


def cast_invalid():
    session().sql("select cast('twelve' as int)").show()


def overflow():
    session().sql("select cast(9999999999 as int)").show()


def index_out_of_bounds():
    session().sql("select array(1, 2)[5]").show()


def ambiguous_column():
    spark = session()
    spark.range(3).join(spark.range(3)).select("id").show()


def type_mismatch():
    session().sql("select array(1) + 1").show()


def union_mismatch():
    spark = session()
    spark.range(3).union(spark.range(3).withColumn("x", F.lit(1))).show()


def raised_in_query():
    session().sql("select raise_error('orders of region 7 are odd')").show()


def subquery_rows():
    session().sql("select (select id from range(3))").show()


def data_source_missing():
    session().read.format("snowstorm").load().show()


def corrupt_parquet():
    spark = session()
    os.makedirs("orders")
    with open("orders/part-0.parquet", "w") as part:
        part.write("these are not the rows you are looking for")
    spark.read.schema("id long").parquet("orders").show()


def schema_changed():
    spark = session()
    spark.createDataFrame([("a",)], "id string").write.parquet("orders")
    spark.read.schema("id int").parquet("orders").show()


def malformed_json():
    spark = session()
    with open("orders.json", "w") as file:
        file.write('{"id": 1}\n{"id": }\n')
    spark.read.schema("id int").option("mode", "FAILFAST").json("orders.json").show()


def bad_runtime_setting():
    session().conf.set("spark.sql.shuffle.partitions", "many")


def model_without_features():
    from pyspark.ml.classification import LogisticRegression

    frame = session().range(3)
    LogisticRegression().fit(frame.withColumn("label", F.lit(1.0)))


def file_vanished():
    spark = session()
    spark.range(3).repartition(2).write.parquet("orders")
    frame = spark.read.parquet("orders")
    for name in os.listdir("orders"):
        os.remove(f"orders/{name}")
    frame.show()


def unsupported_stream():
    spark = session()
    spark.readStream.format("rate").load().groupBy().count().writeStream.outputMode("append").format("console").start()


def checkpoint_changed():
    spark = session()

    def run(columns):
        spark.range(3).write.mode("append").parquet("orders")
        stream = spark.readStream.schema("id long").parquet("orders").groupBy(*columns).count()
        writer = stream.writeStream.outputMode("complete").format("memory").queryName("totals")
        query = writer.option("checkpointLocation", "checkpoint").trigger(availableNow=True).start()
        query.awaitTermination()

    run(["id"])
    run([F.col("id").cast("string").alias("id"), F.lit(1).alias("more")])


def stream_refused():
    import socket

    spark = session()
    spark.range(3).write.parquet("orders")
    query = (
        spark.readStream.schema("id long")
        .parquet("orders")
        .writeStream.foreachBatch(lambda *_: socket.create_connection(("127.0.0.1", 1)))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def stream_mistake():
    spark = session()
    spark.range(3).write.parquet("orders")
    query = (
        spark.readStream.schema("id long")
        .parquet("orders")
        .writeStream.foreachBatch(lambda frame, _: frame.select("amount").show())
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


globals()[sys.argv[1]]()
