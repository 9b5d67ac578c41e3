"""Jobs written after the rules were frozen. Run as: unseen.py FUNCTION."""

import os
import signal
import socket
import sqlite3
import ssl
import sys
import threading
import time
import urllib.request

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

DERBY = {"driver": "org.apache.derby.jdbc.EmbeddedDriver"}


def session():
    return SparkSession.builder.appName(sys.argv[1]).getOrCreate()


def on_executor(work):
    session().sparkContext.parallelize([1], 1).map(lambda _: work()).collect()


def answering(answer):
    """A server that sends every client the same answer and hangs up."""
    server = socket.create_server(("127.0.0.1", 0))

    def accept():
        while True:
            peer, _ = server.accept()
            peer.recv(4096)
            peer.sendall(answer)
            peer.close()

    threading.Thread(target=accept, daemon=True).start()
    return server.getsockname()[1]


def http_502_on_driver():
    port = answering(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
    session()
    urllib.request.urlopen(f"http://127.0.0.1:{port}/")


def http_410():
    port = answering(b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n")
    on_executor(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/"))


def answer_cut_short():
    port = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")
    on_executor(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/").read())


def no_tls_there():
    port = answering(b"hello")

    def connect():
        with socket.create_connection(("127.0.0.1", port)) as plain:
            ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")

    on_executor(connect)


def connect_timeout():
    def connect():
        server = socket.create_server(("127.0.0.1", 0), backlog=0)
        address = server.getsockname()
        held = [socket.socket() for _ in range(3)]
        for one in held:
            one.setblocking(False)
            one.connect_ex(address)
        socket.create_connection(address, timeout=1)

    on_executor(connect)


def thrift_hangs_up():
    server = socket.create_server(("127.0.0.1", 0))

    def accept():
        while True:
            server.accept()[0].close()

    threading.Thread(target=accept, daemon=True).start()
    url = f"jdbc:hive2://127.0.0.1:{server.getsockname()[1]}/default"
    session().read.jdbc(url, "orders", properties={"driver": "org.apache.hive.jdbc.HiveDriver"}).show()


def duplicate_key():
    spark = session()
    url = "jdbc:derby:memory:shop;create=true"
    connection = spark._jvm.org.apache.derby.jdbc.EmbeddedDriver().connect(url, spark._jvm.java.util.Properties())
    connection.createStatement().execute('create table orders ("id" bigint primary key)')
    spark.createDataFrame([(1,), (1,)], "id long").write.jdbc(url, "orders", mode="append", properties=DERBY)


def lock_held_in_database():
    spark = session()
    url = "jdbc:derby:memory:shop;create=true"
    connection = spark._jvm.org.apache.derby.jdbc.EmbeddedDriver().connect(url, spark._jvm.java.util.Properties())
    statement = connection.createStatement()
    statement.execute("call syscs_util.syscs_set_database_property('derby.locks.waitTimeout', '1')")
    statement.execute('create table orders ("id" bigint)')
    connection.setAutoCommit(False)
    statement.execute("lock table orders in exclusive mode")
    spark.range(1).write.jdbc(url, "orders", mode="append", properties=DERBY)


def jdbc_syntax():
    url = "jdbc:derby:memory:shop;create=true"
    session().read.jdbc(url, "(selekt 1) as orders", properties=DERBY).show()


def corrupt_orc():
    spark = session()
    os.makedirs("orders")
    with open("orders/part-0.orc", "wb") as part:
        part.write(os.urandom(500))
    spark.read.schema("id long").orc("orders").show()


def deep_expression():
    frame = session().range(1)
    column = F.col("id")
    for _ in range(6000):
        column = column + 1
    frame.select(column).show()


def wrong_return_schema():
    def double(frames):
        for frame in frames:
            yield frame.rename(columns={"id": "double"})

    session().range(3).mapInPandas(double, "twice long").show()


def pandas_raises():
    frame = session().range(3)
    ratio = F.pandas_udf(lambda values: values.astype("datetime64[ns]") / values, "double")
    frame.select(ratio("id")).show()


def aborts_in_worker():
    on_executor(os.abort)


def interrupted():
    session()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)


def exits_3():
    session()
    sys.exit(3)


def retries_then_gives_up():
    session()
    for attempt in range(3):
        try:
            socket.create_connection(("127.0.0.1", 1))
        except OSError as error:
            print(f"attempt {attempt}: {error}", flush=True)
    raise RuntimeError("gave up after 3 attempts: [Errno 111] Connection refused")


def quality_gate():
    if session().range(3).count() < 4:
        raise Exception("quality gate: 3 orders, at least 4 are expected")


def config_key():
    import configparser

    session()
    configparser.ConfigParser().get("shop", "url")


def date_format():
    from datetime import datetime

    session()
    datetime.strptime("2026-13-01", "%Y-%m-%d")  # noqa: DTZ007 - it does not get that far


def sqlite_read_only():
    sqlite3.connect("orders.db").execute("create table orders (id)")
    path = os.path.abspath("orders.db")
    on_executor(lambda: sqlite3.connect(f"file:{path}?mode=ro", uri=True).execute("insert into orders values (1)"))


globals()[sys.argv[1]]()
