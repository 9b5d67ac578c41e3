"""Jobs whose program is wrong. Run as: mistakes.py FUNCTION."""

import argparse
import os
import sys
import threading

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it


def session():
    return SparkSession.builder.appName(sys.argv[1]).getOrCreate()


def missing_module():
    import orders_toolkit  # noqa: F401


def missing_module_on_executor():
    def load(_):
        import orders_toolkit

        return orders_toolkit.load()

    session().sparkContext.parallelize([1], 1).map(load).collect()


def name_error():
    session().range(undefined_count).show()  # noqa: F821


def missing_variable():
    session().range(int(os.environ["ORDERS_LIMIT"])).show()


def assertion():
    assert session().range(3).count() == 4, "orders are incomplete"


def plain_value_error():
    if session().range(3).count() < 4:
        raise ValueError("orders of yesterday look odd")


def own_exception():
    class OrdersLate(Exception):  # noqa: N818
        pass

    session()
    raise OrdersLate("nothing came in since midnight")


def bad_argument():
    parser = argparse.ArgumentParser()
    parser.add_argument("function")
    parser.add_argument("--day", required=True)
    parser.parse_args()


def udf_value_error():
    frame = session().createDataFrame([("twelve",)], ["amount"])
    frame.select(F.udf(lambda text: int(text), "int")("amount")).show()


def udf_key_error():
    frame = session().createDataFrame([("b",)], ["sku"])
    frame.select(F.udf(lambda sku: {"a": 1}[sku], "int")("sku")).show()


def no_session():
    F.udf(lambda sku: {"a": 1}[sku], "int")


def udf_own_exception():
    def check(amount):
        raise RuntimeError(f"amount {amount} breaks rule 7")

    session().range(1).select(F.udf(check, "int")("id")).show()


def not_serialisable():
    lock = threading.Lock()
    session().sparkContext.parallelize([1], 1).map(lambda row: (lock, row)).collect()


def context_on_executor():
    spark = session()
    spark.sparkContext.parallelize([1], 1).map(lambda row: spark.range(row).count()).collect()


def wrong_types():
    session().createDataFrame([("a", 1), ("b", "two")], "name string, amount int").show()


def missing_local_file():
    session()
    with open("/nowhere/orders.csv") as orders:
        print(orders.read())


def missing_java_class():
    session()._jvm.java.lang.Class.forName("com.example.OrdersReader")


def used_after_stop():
    spark = session()
    spark.stop()
    spark.range(3).count()


globals()[sys.argv[1]]()
