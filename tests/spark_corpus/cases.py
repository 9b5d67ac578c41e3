"""Which jobs fail how, and what each failure is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from airflow_delay_provider.spark.failures import Verdict

#: local: client mode in one JVM; client: against a standalone cluster; cluster: the driver runs on its worker.
Mode = Literal["local", "client", "cluster"]

TRANSIENT, INFRASTRUCTURE, RESOURCE, PERMANENT, UNKNOWN = Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One way to fail."""

    name: str
    expected: Verdict
    why: str
    #: File in makers and what it gets; without one, `submit` says all.
    job: str | None = None
    mode: Mode = "local"
    #: What differs from the settings of the runner; an empty value removes one of them.
    conf: dict[str, str] = field(default_factory=dict)
    #: Further arguments of spark-submit; they may use {work} and {master}.
    submit: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    #: The recorded rules had not seen this failure when they first classified it.
    held_out: bool = False


def job(name: str, file: str, expected: Verdict, why: str, **more: object) -> Case:
    """A function of a maker, called like the case unless it stands behind a colon."""
    return Case(name=name, job=file, expected=expected, why=why, **more)  # type: ignore[arg-type]


STRUCTURED = {"spark.log.structuredLogging.enabled": "true"}
JAVA_CAUSES = {"spark.sql.pyspark.jvmStacktrace.enabled": "true"}
HIVE = "org.apache.spark.sql.hive.thriftserver.SparkSQLCLIDriver"


def sql(name: str, query: str, expected: Verdict, why: str, **conf: str) -> Case:
    """A JVM application: no Python has a word in its log."""
    settings = {one.replace("__", "."): value for one, value in conf.items()}
    return Case(
        name=name,
        expected=expected,
        why=why,
        submit=("--class", HIVE, "spark-internal"),
        arguments=("-e", query),
        conf={"spark.sql.catalogImplementation": "in-memory", **settings},
    )


SOURCES = [
    job("refused_on_executor", "sources", TRANSIENT, "the source may come back"),
    job("refused_on_driver", "sources", TRANSIENT, "the source may come back"),
    job("refused_hdfs", "sources", TRANSIENT, "the name node may come back"),
    job("refused_jdbc", "sources", TRANSIENT, "the database may come back"),
    job("http_503", "sources", TRANSIENT, "the service says that it is unavailable now"),
    job("http_429", "sources", TRANSIENT, "the service asks for fewer requests"),
    job("http_404", "sources", PERMANENT, "the resource does not exist"),
    job("http_403", "sources", PERMANENT, "the service forbids it"),
    job("read_timeout", "sources", TRANSIENT, "the service did not answer in time"),
    job("connection_reset", "sources", TRANSIENT, "the connection broke"),
    job("host_unknown", "sources", TRANSIENT, "name services fail for a while; attempts are bounded"),
    job("sqlite_locked", "sources", TRANSIENT, "the lock will be given up"),
    job("sqlite_no_table", "sources", PERMANENT, "the table does not exist"),
    job("derby_locked", "sources", TRANSIENT, "another process holds the database for now", conf=JAVA_CAUSES),
    job("jdbc_database_missing", "sources", UNKNOWN, "PySpark hides why the database could not be connected"),
    job(
        "jdbc_database_missing_shown",
        "sources:jdbc_database_missing",
        PERMANENT,
        "the database does not exist",
        conf=JAVA_CAUSES,
    ),
    job("jdbc_table_missing", "sources", PERMANENT, "the table does not exist"),
    job("jdbc_no_driver", "sources", PERMANENT, "the jar of the driver is missing"),
    job("metastore_refused", "sources", TRANSIENT, "an AnalysisException, but the metastore may come back"),
    job("wrapped_refusal", "sources", TRANSIENT, "the declared cause is a refused connection"),
    job("mistake_while_handling_refusal", "sources", PERMANENT, "the last exception is a mistake of the program"),
    job("survived_refusal_then_mistake", "sources", PERMANENT, "the refused connection was survived"),
    job("survived_refusal_then_exit", "sources", UNKNOWN, "the refused connection was survived; the exit says nothing"),
]
MISTAKES = [
    job("missing_module", "mistakes", PERMANENT, "the module is not installed"),
    job("missing_module_on_executor", "mistakes", PERMANENT, "the module is not installed"),
    job("name_error", "mistakes", PERMANENT, "a name is not defined"),
    job("missing_variable", "mistakes", PERMANENT, "an environment variable is missing"),
    job("assertion", "mistakes", UNKNOWN, "only the author knows what the assertion means"),
    job("plain_value_error", "mistakes", UNKNOWN, "only the author knows what the error means"),
    job("own_exception", "mistakes", UNKNOWN, "only the author knows what the exception means"),
    job("bad_argument", "mistakes", PERMANENT, "an argument is missing"),
    job("udf_value_error", "mistakes", PERMANENT, "the value is no number"),
    job("udf_key_error", "mistakes", PERMANENT, "a key is missing"),
    job("no_session", "mistakes", PERMANENT, "PySpark is used before there is a session"),
    job("udf_own_exception", "mistakes", UNKNOWN, "only the author knows what the error means"),
    job("not_serialisable", "mistakes", PERMANENT, "the closure cannot be sent"),
    job("context_on_executor", "mistakes", PERMANENT, "the session cannot be used on an executor"),
    job("wrong_types", "mistakes", PERMANENT, "the rows do not fit the schema"),
    job("missing_local_file", "mistakes", PERMANENT, "the file does not exist"),
    job("missing_java_class", "mistakes", PERMANENT, "the class is in no jar"),
    job("used_after_stop", "mistakes", UNKNOWN, "the log does not say why the context is stopped"),
    Case(name="syntax_error", submit=("{work}/broken.py",), expected=PERMANENT, why="the program cannot be parsed"),
    Case(name="missing_application", submit=("{work}/nowhere.py",), expected=PERMANENT, why="the file does not exist"),
    Case(
        name="missing_main_class",
        submit=("--class", "com.example.Orders", "{work}/empty.jar"),
        expected=PERMANENT,
        why="the class is not in the jar",
    ),
    Case(
        name="unknown_option",
        submit=("--speed", "high", "{work}/nowhere.py"),
        expected=PERMANENT,
        why="spark-submit does not know the option",
    ),
    job("name_error_again", "mistakes:name_error", PERMANENT, "a name is not defined", conf=STRUCTURED),
    Case(
        name="bad_master",
        job="mistakes",
        submit=("--master", "sparkle://127.0.0.1:1"),
        arguments=("assertion",),
        expected=PERMANENT,
        why="there is no such kind of master",
    ),
    job(
        "bad_memory_setting",
        "mistakes:assertion",
        PERMANENT,
        "the setting is no size",
        conf={"spark.driver.memory": "plenty"},
    ),
    job(
        "missing_jar",
        "mistakes:name_error",
        PERMANENT,
        "the jar does not exist; the program is wrong as well",
        submit=("--jars", "{work}/nowhere.jar"),
    ),
    Case(
        name="missing_package",
        job="mistakes",
        arguments=("assertion",),
        expected=PERMANENT,
        submit=(
            "--packages",
            "com.example:orders:1.0",
            "--conf",
            "spark.jars.repositories=file:{work}",
            "--conf",
            "spark.jars.ivySettings={work}/ivy.xml",
        ),
        why="no repository has the package",
    ),
]
QUERIES = [
    *(
        job(name, "queries", PERMANENT, why)
        for name, why in {
            "column_missing": "the column does not exist",
            "table_missing": "the table does not exist",
            "parse_error": "the query cannot be parsed",
            "path_missing": "the path does not exist",
            "output_exists": "the output exists already",
            "output_not_writable": "the output folder cannot be made",
            "divide_by_zero": "the data divides by zero",
            "cast_invalid": "the data cannot be cast",
            "overflow": "the number is too large for its type",
            "index_out_of_bounds": "the array is shorter",
            "ambiguous_column": "the column is ambiguous",
            "type_mismatch": "the types do not fit",
            "union_mismatch": "the columns do not fit",
            "subquery_rows": "the subquery has more than one row",
            "data_source_missing": "the data source is in no jar",
            "corrupt_parquet": "the file is no Parquet file",
            "schema_changed": "the file has another type",
            "malformed_json": "the file is no JSON",
            "bad_runtime_setting": "the setting is no number",
            "model_without_features": "the column of the features is missing",
            "unsupported_stream": "the output mode is not supported",
            "checkpoint_changed": "the query does not fit its checkpoint",
            "stream_mistake": "the column does not exist",
        }.items()
    ),
    job("raised_in_query", "queries", PERMANENT, "the query itself refuses the data"),
    job(
        "file_vanished", "queries", TRANSIENT, "the files were replaced while they were read; a new attempt lists them"
    ),
    job("stream_refused", "queries", TRANSIENT, "the sink may come back"),
    job("column_missing_structured", "queries:column_missing", PERMANENT, "the column does not exist", conf=STRUCTURED),
    sql("jvm_parse_error", "selekt 1", PERMANENT, "the query cannot be parsed"),
    sql("jvm_cast_invalid", "select cast('twelve' as int)", PERMANENT, "the data cannot be cast"),
    sql("jvm_path_missing", "select * from parquet.`/nowhere/orders`", PERMANENT, "the path does not exist"),
    sql(
        "jvm_refused_hdfs",
        "select * from text.`hdfs://127.0.0.1:1/orders`",
        TRANSIENT,
        "the name node may come back",
        spark__hadoop__ipc__client__connect__max__retries="0",
    ),
    sql(
        "jvm_metastore_refused",
        "select * from orders",
        TRANSIENT,
        "the metastore may come back",
        spark__sql__catalogImplementation="hive",
        spark__hadoop__hive__metastore__uris="thrift://127.0.0.1:1",
        spark__hadoop__hive__metastore__client__connect__retry__delay="0",
    ),
]
LIMITS = [
    job(
        "driver_heap",
        "limits:heap",
        RESOURCE,
        "the heap of the driver is too small",
        conf={"spark.driver.maxResultSize": "0"},
    ),
    job(
        "driver_heap_structured",
        "limits:heap",
        RESOURCE,
        "the heap of the driver is too small",
        conf={"spark.driver.maxResultSize": "0", **STRUCTURED},
    ),
    job(
        "result_size",
        "limits",
        RESOURCE,
        "the result is larger than allowed",
        conf={"spark.driver.maxResultSize": "1m"},
    ),
    job("python_memory", "limits", RESOURCE, "a Python worker may not take more memory"),
    job("python_memory_on_driver", "limits", RESOURCE, "the Python driver may not take more memory"),
    job("broadcast", "limits", RESOURCE, "the table does not fit into the memory of the driver"),
    job(
        "task_size",
        "limits",
        RESOURCE,
        "the task is larger than a message may be",
        mode="client",
        conf={"spark.rpc.message.maxSize": "1"},
    ),
    job("device_full", "limits", RESOURCE, "the disk is full"),
    job(
        "shuffle_disk", "limits", RESOURCE, "the disk of the shuffle data is full", conf={"spark.local.dir": "{tmpfs}"}
    ),
    job(
        "executor_heap",
        "limits",
        RESOURCE,
        "the heap of the executor is too small",
        mode="client",
        conf={"spark.executor.memory": "480m", "spark.task.maxFailures": "1"},
    ),
]
ONCE = {"spark.task.maxFailures": "1"}
LOSSES = [
    job("driver_sigkill", "losses", INFRASTRUCTURE, "something killed the driver"),
    job("driver_sigterm", "losses", INFRASTRUCTURE, "something ended the driver"),
    job("driver_exit_75", "losses", TRANSIENT, "the program asks to be tried again (EX_TEMPFAIL)"),
    job("driver_exit_1", "losses", UNKNOWN, "the program says nothing"),
    job("driver_jvm_sigkill", "losses", INFRASTRUCTURE, "something killed the JVM of the driver"),
    job("driver_jvm_sigterm", "losses", INFRASTRUCTURE, "something ended the JVM of the driver"),
    job("python_worker_sigkill", "losses", INFRASTRUCTURE, "something killed a Python worker"),
    job("python_worker_sigsegv", "losses", INFRASTRUCTURE, "a Python worker crashed"),
    job("executor_sigkill", "losses", INFRASTRUCTURE, "something killed the executor", mode="client", conf=ONCE),
    job(
        "executor_sigkill_structured",
        "losses:executor_sigkill",
        INFRASTRUCTURE,
        "something killed the executor",
        mode="client",
        conf={**ONCE, **STRUCTURED},
    ),
    job("executor_sigterm", "losses", INFRASTRUCTURE, "something ended the executor", mode="client", conf=ONCE),
    job(
        "shuffle_lost",
        "losses",
        INFRASTRUCTURE,
        "shuffle data was lost",
        mode="client",
        conf={"spark.stage.maxConsecutiveAttempts": "1"},
    ),
    job(
        "no_master",
        "losses:driver_exit_1",
        INFRASTRUCTURE,
        "no master answers",
        submit=("--master", "spark://127.0.0.1:1"),
    ),
    Case(
        name="no_yarn",
        submit=("--master", "yarn", "--deploy-mode", "cluster", "--class", "com.example.Orders", "{work}/empty.jar"),
        conf={
            "spark.hadoop.yarn.resourcemanager.connect.max-wait.ms": "1000",
            "spark.hadoop.yarn.resourcemanager.connect.retry-interval.ms": "500",
            "spark.hadoop.ipc.client.connect.max.retries": "0",
            "spark.hadoop.yarn.resourcemanager.address": "127.0.0.1:8032",
        },
        expected=INFRASTRUCTURE,
        why="no resource manager answers",
    ),
    Case(
        name="no_kubernetes",
        submit=(
            "--master",
            "k8s://http://127.0.0.1:1",
            "--deploy-mode",
            "cluster",
            "--class",
            "com.example.Orders",
            "local:///opt/orders.jar",
        ),
        conf={
            "spark.kubernetes.container.image": "spark",
            "spark.kubernetes.submission.connectionTimeout": "1000",
            "spark.driver.bindAddress": "",
            "spark.driver.host": "",
        },
        expected=INFRASTRUCTURE,
        why="no API server answers",
    ),
]
CLUSTER = [
    job("cluster_refused", "sources:refused_on_driver", TRANSIENT, "the source may come back", mode="cluster"),
    job("cluster_missing_module", "mistakes:missing_module", PERMANENT, "the module is not installed", mode="cluster"),
    job("cluster_column_missing", "queries:column_missing", PERMANENT, "the column does not exist", mode="cluster"),
    job("cluster_exit_1", "losses:driver_exit_1", UNKNOWN, "the program says nothing", mode="cluster"),
    job(
        "cluster_driver_sigkill", "losses:driver_sigkill", INFRASTRUCTURE, "something killed the driver", mode="cluster"
    ),
    job(
        "cluster_jvm_sigkill",
        "losses:driver_jvm_sigkill",
        UNKNOWN,
        "neither the state nor the log of the driver shows that its JVM was killed",
        mode="cluster",
    ),
    job("cluster_device_full", "limits:device_full", RESOURCE, "the disk is full", mode="cluster"),
    job("cluster_worker_lost", "losses:waits", INFRASTRUCTURE, "the worker with the driver was lost", mode="cluster"),
    Case(
        name="cluster_missing_class",
        mode="cluster",
        submit=("--class", "com.example.Orders", "{work}/empty.jar"),
        expected=PERMANENT,
        why="the class is not in the jar",
    ),
    Case(
        name="cluster_missing_jar",
        mode="cluster",
        submit=("--class", "com.example.Orders", "{work}/nowhere.jar"),
        expected=PERMANENT,
        why="the jar does not exist",
    ),
    Case(
        name="cluster_no_master",
        submit=(
            "--master",
            "spark://127.0.0.1:1",
            "--deploy-mode",
            "cluster",
            "--class",
            "com.example.Orders",
            "{work}/empty.jar",
        ),
        expected=INFRASTRUCTURE,
        why="no master answers",
    ),
    Case(
        name="cluster_python_refused",
        submit=("--master", "spark://127.0.0.1:1", "--deploy-mode", "cluster"),
        job="mistakes",
        arguments=("assertion",),
        expected=PERMANENT,
        why="standalone clusters run no Python drivers",
    ),
]
#: Written and recorded after the rules were frozen.
UNSEEN = [
    job(name, "unseen", expected, why, held_out=True)
    for name, expected, why in [
        ("http_502_on_driver", TRANSIENT, "a gateway has lost its service for now"),
        ("http_410", PERMANENT, "the resource is gone for good"),
        ("answer_cut_short", TRANSIENT, "the connection broke"),
        ("no_tls_there", PERMANENT, "the port speaks no TLS"),
        ("connect_timeout", TRANSIENT, "the server did not answer in time"),
        ("thrift_hangs_up", TRANSIENT, "the connection broke"),
        ("duplicate_key", PERMANENT, "the key is taken"),
        ("lock_held_in_database", TRANSIENT, "the lock will be given up"),
        ("jdbc_syntax", PERMANENT, "the statement cannot be parsed"),
        ("corrupt_orc", PERMANENT, "the file is no ORC file"),
        ("deep_expression", PERMANENT, "the expression is too deep"),
        ("wrong_return_schema", PERMANENT, "the columns are not the promised ones"),
        ("pandas_raises", PERMANENT, "the types do not fit"),
        ("aborts_in_worker", INFRASTRUCTURE, "a Python worker crashed"),
        ("interrupted", INFRASTRUCTURE, "something interrupted the driver"),
        ("exits_3", UNKNOWN, "the program says nothing"),
        ("retries_then_gives_up", TRANSIENT, "the message names a refused connection"),
        ("quality_gate", UNKNOWN, "only the author knows what the exception means"),
        ("config_key", PERMANENT, "a setting is missing"),
        ("date_format", PERMANENT, "the date cannot be parsed"),
        ("sqlite_read_only", PERMANENT, "the database may not be written"),
    ]
]
CASES = [*SOURCES, *MISTAKES, *QUERIES, *LIMITS, *LOSSES, *CLUSTER, *UNSEEN]
