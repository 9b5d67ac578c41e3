"""Jobs whose sources are not there, are slow, or say no. Run as: sources.py FUNCTION."""

import glob
import os
import socket
import sqlite3
import struct
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pyspark.sql import SparkSession


def session(**settings):
    builder = SparkSession.builder.appName(sys.argv[1])
    for name, value in settings.items():
        builder = builder.config(name.replace("__", "."), value)
    return builder.getOrCreate()


def on_executor(work):
    session().sparkContext.parallelize([1], 1).map(lambda _: work()).collect()


def serve(status):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/orders"


def listen(handle):
    server = socket.create_server(("127.0.0.1", 0))

    def accept():
        while True:
            handle(server.accept()[0])

    threading.Thread(target=accept, daemon=True).start()
    return f"http://127.0.0.1:{server.getsockname()[1]}/orders"


def refused_on_executor():
    on_executor(lambda: socket.create_connection(("127.0.0.1", 1)))


def refused_on_driver():
    session()
    urllib.request.urlopen("http://127.0.0.1:1/orders")


def refused_hdfs():
    session(spark__hadoop__ipc__client__connect__max__retries="0").read.text("hdfs://127.0.0.1:1/orders").show()


def refused_jdbc():
    session().read.jdbc(
        "jdbc:hive2://127.0.0.1:1/default", "orders", properties={"driver": "org.apache.hive.jdbc.HiveDriver"}
    ).show()


def http_503():
    url = serve(503)
    on_executor(lambda: urllib.request.urlopen(url).read())


def http_429():
    url = serve(429)
    on_executor(lambda: urllib.request.urlopen(url).read())


def http_404():
    url = serve(404)
    on_executor(lambda: urllib.request.urlopen(url).read())


def http_403():
    url = serve(403)
    on_executor(lambda: urllib.request.urlopen(url).read())


def read_timeout():
    held = []
    url = listen(held.append)
    on_executor(lambda: urllib.request.urlopen(url, timeout=1).read())


def connection_reset():
    def reset(peer):
        peer.recv(1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()

    url = listen(reset)
    on_executor(lambda: urllib.request.urlopen(url).read())


def host_unknown():
    on_executor(lambda: urllib.request.urlopen("http://orders.invalid/"))


def sqlite_locked():
    holder = sqlite3.connect("orders.db", isolation_level=None)
    holder.execute("create table orders (id)")
    holder.execute("begin exclusive")
    path = os.path.abspath("orders.db")
    on_executor(lambda: sqlite3.connect(path, timeout=0.1).execute("select * from orders"))


def sqlite_no_table():
    on_executor(lambda: sqlite3.connect(":memory:").execute("select * from orders"))


def derby_locked():
    """Another owner of the database: a second Derby, loaded apart from the first."""
    spark = session()
    jvm, gateway = spark._jvm, spark.sparkContext._gateway
    url = f"jdbc:derby:{os.path.abspath('shop')}"
    jars = glob.glob(f"{os.environ['SPARK_HOME']}/jars/derby*.jar")
    urls = gateway.new_array(jvm.java.net.URL, len(jars))
    for number, jar in enumerate(jars):
        urls[number] = jvm.java.io.File(jar).toURI().toURL()
    loader = jvm.java.net.URLClassLoader(urls, jvm.java.lang.ClassLoader.getPlatformClassLoader())
    constructor = loader.loadClass("org.apache.derby.jdbc.EmbeddedDriver").getConstructors()[0]
    other = constructor.newInstance(gateway.new_array(jvm.java.lang.Object, 0))
    owner = other.connect(f"{url};create=true", jvm.java.util.Properties())
    print("owned:", not owner.isClosed())
    spark.read.jdbc(url, "orders", properties={"driver": "org.apache.derby.jdbc.EmbeddedDriver"}).show()


def jdbc_database_missing():
    session().read.jdbc(
        "jdbc:derby:/nowhere/shop", "orders", properties={"driver": "org.apache.derby.jdbc.EmbeddedDriver"}
    ).show()


def jdbc_table_missing():
    session().read.jdbc(
        "jdbc:derby:memory:shop;create=true", "orders", properties={"driver": "org.apache.derby.jdbc.EmbeddedDriver"}
    ).show()


def jdbc_no_driver():
    session().read.jdbc("jdbc:postgresql://127.0.0.1:1/shop", "orders").show()


def metastore_refused():
    spark = session(
        spark__sql__catalogImplementation="hive",
        spark__hadoop__hive__metastore__uris="thrift://127.0.0.1:1",
        spark__hadoop__hive__metastore__client__connect__retry__delay="0",
        spark__hadoop__hive__metastore__failure__retries="0",
    )
    spark.sql("select * from orders").show()


def wrapped_refusal():
    session()
    try:
        socket.create_connection(("127.0.0.1", 1))
    except OSError as error:
        raise RuntimeError("orders could not be loaded") from error


def mistake_while_handling_refusal():
    session()
    try:
        socket.create_connection(("127.0.0.1", 1))
    except OSError:
        notify_the_team()  # noqa: F821 - the mistake this job is about


def survived_refusal_then_mistake():
    spark = session()
    marker = os.path.abspath("tried")

    def fail_once(_):
        if not os.path.exists(marker):
            open(marker, "w").close()
            socket.create_connection(("127.0.0.1", 1))
        return 1

    totals = {"eu": spark.sparkContext.parallelize([1], 1).map(fail_once).sum()}
    print(totals["us"])


def survived_refusal_then_exit():
    spark = session()
    try:
        spark.sparkContext.parallelize([1], 1).map(lambda _: socket.create_connection(("127.0.0.1", 1))).collect()
    except Exception:  # noqa: BLE001 - as careless jobs do
        print("no orders today, going on")
    if spark.range(3).count() == 3:
        sys.exit("three orders are too few")


globals()[sys.argv[1]]()
