"""Jobs whose driver, executor, worker or shuffle data is lost. Run as: losses.py FUNCTION."""

import glob
import os
import signal
import sys
import time

from pyspark.sql import SparkSession


def session():
    return SparkSession.builder.appName(sys.argv[1]).getOrCreate()


def jvm_above(pid):
    """Return the id of the JVM that started this Python process."""
    while True:
        with open(f"/proc/{pid}/stat") as stat:
            pid = int(stat.read().rpartition(")")[2].split()[1])
        with open(f"/proc/{pid}/comm") as comm:
            if comm.read().strip() == "java":
                return pid


def driver_sigkill():
    session()
    os.kill(os.getpid(), signal.SIGKILL)


def driver_sigterm():
    session()
    os.kill(os.getpid(), signal.SIGTERM)


def driver_exit_75():
    session()
    sys.exit(75)


def driver_exit_1():
    session()
    sys.exit(1)


def driver_jvm_sigkill():
    session()
    os.kill(jvm_above(os.getpid()), signal.SIGKILL)
    time.sleep(60)


def driver_jvm_sigterm():
    spark = session()
    os.kill(jvm_above(os.getpid()), signal.SIGTERM)
    time.sleep(2)
    spark.range(3).count()


def python_worker_sigkill():
    session().sparkContext.parallelize([1], 1).map(lambda _: os.kill(os.getpid(), signal.SIGKILL)).collect()


def python_worker_sigsegv():
    session().sparkContext.parallelize([1], 1).map(lambda _: os.kill(os.getpid(), signal.SIGSEGV)).collect()


def executor_sigkill():
    find = jvm_above
    session().sparkContext.parallelize([1], 1).map(lambda _: os.kill(find(os.getpid()), signal.SIGKILL)).collect()


def executor_sigterm():
    find = jvm_above

    def end(_):
        os.kill(find(os.getpid()), signal.SIGTERM)
        time.sleep(60)

    session().sparkContext.parallelize([1], 1).map(end).collect()


def shuffle_lost():
    spark = session()
    totals = spark.sparkContext.parallelize(range(100), 2).map(lambda row: (row % 5, row)).reduceByKey(int.__add__, 2)
    totals.count()
    for name in glob.glob(f"{os.environ['SCRATCH']}/**/shuffle_*", recursive=True):
        os.remove(name)
    totals.collect()


def waits():
    session()
    print("waiting", flush=True)
    time.sleep(300)


globals()[sys.argv[1]]()
