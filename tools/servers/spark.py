"""A private Spark standalone cluster, a master and workers from the pyspark package, and Spark's Kafka connector."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pyspark

from tools.servers.cache import CannotFillError, cached, run
from tools.servers.component import Component, ComponentDiedError, wait_for
from tools.servers.kafka import free_ports
from tools.servers.kafka_distribution import copy_jars, find_java, find_maven
from tools.servers.server import UnavailableError
from tools.servers.sessions import Guardian

HOST = "127.0.0.1"
START_SECONDS = 120
HOME = Path(pyspark.__file__).parent
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"


ARCHIVE = "spark.jsa"
#: Uses what the jobs of tests use: SQL, and functions in Python.
ARCHIVED_JOB = """
from pyspark.sql import SparkSession

spark = SparkSession.builder.config("spark.ui.enabled", "false").getOrCreate()
spark.range(10).count()
spark.sparkContext.parallelize(range(10)).map(str).collect()
spark.stop()
"""

#: What pyspark 4.2 does not bring itself. Named one by one: the connector's own POM adds a repository that not every
#: network reaches.
KAFKA_CONNECTOR = {
    "org.apache.spark:spark-sql-kafka-0-10_2.13": pyspark.__version__,
    "org.apache.kafka:kafka-clients": "3.9.2",
    "org.apache.commons:commons-pool2": "2.13.1",
}
#: The first one that can be had is used: not every mirror has all versions, and this small part hardly changes.
TOKEN_PROVIDER = "org.apache.spark:spark-token-provider-kafka-0-10_2.13"
TOKEN_PROVIDER_VERSIONS = (pyspark.__version__, "4.0.0")


class SparkCluster:
    """Master and workers can be killed and started separately; the master keeps no state."""

    name = "spark"

    def __init__(self, *, workers: int = 1, cores: int = 1, memory: str = "1g", many_hosts: bool = False) -> None:
        self._cores = cores
        #: Spark runs a speculative copy of a task on another host only.
        self._many_hosts = many_hosts
        self._memory = memory
        self._worker_ports = [f"worker {number} ui" for number in range(workers)]
        self._home: Path | None = None
        self._guardian: Guardian | None = None
        self._ports: dict[str, int] = {}
        self._master: Component | None = None
        self._workers: list[Component] = []

    @property
    def url(self) -> str:
        return f"spark://{HOST}:{self._ports['rpc']}"

    @property
    def rest_port(self) -> int:
        """Port of the REST server, which submits drivers in cluster mode."""
        return self._ports["rest"]

    @property
    def ui_port(self) -> int:
        """Port of the master's web UI."""
        return self._ports["ui"]

    def start(self, run_dir: Path, *, worker: bool = True) -> None:
        java = find_java()
        self._home = (run_dir / "spark").resolve()
        self._home.mkdir(parents=True)
        log_dir = run_dir / "logs"
        log_dir.mkdir(parents=True, exist_ok=True)
        self._guardian = Guardian()
        for _ in range(3):  # another run may take a free port between our look and our start
            names = ["rpc", "rest", "ui", *self._worker_ports]
            self._ports = dict(zip(names, free_ports(len(names)), strict=True))
            self._master, self._workers = self._plan_components(log_dir, self._guardian, java)
            try:
                self.start_master()
            except (TimeoutError, ComponentDiedError):
                self.kill_master()
                continue
            for number in range(len(self._workers) if worker else 0):
                self.start_worker(number)
            return
        raise RuntimeError(f"Spark did not start; see {log_dir}/spark-master.log")

    def start_master(self) -> None:
        """Return once it accepts jobs."""
        assert self._master is not None
        self._master.start()
        wait_for(self.is_alive, what="the Spark master is alive", seconds=START_SECONDS, components=[self._master])

    def start_worker(self, number: int = 0) -> None:
        """Return once the master knows it."""
        before = self._alive_workers()
        worker = self._workers[number]
        worker.start()
        wait_for(
            lambda: self._alive_workers() > before,
            what="the worker is known",
            seconds=START_SECONDS,
            components=[worker],
        )

    def kill_master(self) -> None:
        """Kill -9 the master."""
        assert self._master is not None
        self._master.kill()

    def kill_worker(self, number: int = 0) -> None:
        """Kill -9 one worker and its executors."""
        self._workers[number].kill()

    def stop(self) -> None:
        for component in (self._master, *self._workers):
            if component is not None:
                component.kill()
        if self._guardian is not None:
            self._guardian.stop()
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)

    def state(self) -> dict[str, Any] | None:
        """Return the state of the master; None while it does not respond."""
        try:
            answer = httpx.get(f"http://{HOST}:{self.ui_port}/json/", timeout=30)
            return dict(answer.raise_for_status().json())
        except (httpx.TransportError, httpx.HTTPStatusError, ValueError):
            # A master that has only just begun serves its page in place of its state.
            return None

    def is_alive(self) -> bool:
        """Tell whether the master has left its initial standby state."""
        return (self.state() or {}).get("status") == "ALIVE"

    def has_worker(self) -> bool:
        return self._alive_workers() > 0

    def _alive_workers(self) -> int:
        return int((self.state() or {}).get("aliveworkers", 0))

    def applications(self) -> list[dict[str, Any]]:
        """The applications that run or wait."""
        return list(self._require_state()["activeapps"])

    def drivers(self) -> list[dict[str, Any]]:
        """The drivers of cluster mode that run or wait."""
        return list(self._require_state()["activedrivers"])

    def executor_files(self, pattern: str) -> list[Path]:
        """Return files in the working directories of all executors so far, such as ``stderr``."""
        return [] if self._home is None else sorted(self._home.glob(f"app-*/*/{pattern}"))

    def env(self) -> dict[str, str]:
        """Return the environment for programs that submit jobs."""
        return client_environment()

    def _require_state(self) -> dict[str, Any]:
        state = self.state()
        assert state is not None, "the master does not answer"
        return state

    def _plan_components(self, log_dir: Path, guardian: Guardian, java: Path) -> tuple[Component, list[Component]]:
        program = str(HOME / "bin/spark-class")
        env = {**os.environ, **client_environment(), **self._daemon_environment(java)}
        package = "org.apache.spark.deploy"
        master = [program, f"{package}.master.Master", "--host", HOST, "--port", str(self._ports["rpc"])]
        master += ["--webui-port", str(self.ui_port)]
        worker = [program, f"{package}.worker.Worker"]
        worker += ["--cores", str(self._cores), "--memory", self._memory]
        return (
            Component("spark-master", master, log_dir=log_dir, env=env, guardian=guardian),
            [
                Component(
                    f"spark-{name.removesuffix(' ui').replace(' ', '-')}",
                    [*worker, "--host", self._host(number), "--webui-port", str(self._ports[name]), self.url],
                    log_dir=log_dir,
                    env=env,
                    guardian=guardian,
                )
                for number, name in enumerate(self._worker_ports)
            ],
        )

    def _host(self, worker: int) -> str:
        return f"127.0.0.{1 + worker}" if self._many_hosts else HOST

    def _daemon_environment(self, java: Path) -> dict[str, str]:
        # A job that takes all cores would starve others for as long as a busy machine needs for it.
        options = {"deploy.defaultCores": 1, "master.rest.enabled": "true"}
        options |= {"master.rest.host": HOST, "master.rest.port": self.rest_port}
        return {
            "JAVA_HOME": str(java.resolve().parents[1]),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": QUICK_JVM,
            "SPARK_MASTER_OPTS": " ".join(f"-Dspark.{name}={value}" for name, value in options.items()),
            "SPARK_WORKER_DIR": str(self._home),
            "SPARK_LOCAL_DIRS": str(self._home),
        }


def client_environment() -> Mapping[str, str]:
    """Everything on loopback, and the Python of the tests for drivers and executors."""
    path = f"{HOME / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {
        "SPARK_HOME": str(HOME),
        "SPARK_LOCAL_IP": HOST,
        "PATH": path,
        "PYSPARK_PYTHON": sys.executable,
        # Of the JVM that only composes the command of the next one, and of the driver.
        "SPARK_LAUNCHER_OPTS": QUICK_JVM,
        "SPARK_SUBMIT_OPTS": archive_options(),
    }


def find_kafka_connector() -> list[Path]:
    """Return the jars with which Spark reads and writes Kafka topics, fetched with Maven once for all checkouts."""
    try:
        folder = cached(f"spark-kafka-connector-{pyspark.__version__}", _fetch_kafka_connector)
    except CannotFillError as failure:
        raise UnavailableError(f"Maven could not fetch Spark's Kafka connector: {failure}") from failure
    return sorted(folder.glob("*.jar"))


def _fetch_kafka_connector(folder: Path) -> None:
    print("servers: fetching Spark's Kafka connector with Maven, once", flush=True)
    maven, java = find_maven(), find_java()
    copy_jars(_project_of(KAFKA_CONNECTOR), folder, maven=maven, java=java)
    for version in TOKEN_PROVIDER_VERSIONS:
        try:
            return copy_jars(_project_of({TOKEN_PROVIDER: version}), folder, maven=maven, java=java)
        except CannotFillError as error:
            failure = error
    raise failure


def _project_of(jars: Mapping[str, str]) -> str:
    nothing_else = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
    dependencies = []
    for artifact, version in jars.items():
        group, name = artifact.split(":")
        coordinates = f"<groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version>"
        dependencies.append(f"<dependency>{coordinates}{nothing_else}</dependency>")
    return (
        "<project><modelVersion>4.0.0</modelVersion><groupId>delay</groupId><artifactId>jars</artifactId>"
        f"<version>1</version><packaging>pom</packaging><dependencies>{''.join(dependencies)}</dependencies></project>"
    )


@cache
def archive_options() -> str:
    """Options with which a JVM maps Spark's classes from an archive: loading them takes half of a short job's time.

    The archive is made once, by a job. A JVM that it does not fit ignores it.
    """
    try:
        java = find_java().resolve()
        jars = HOME / "jars"
        built_from = f"{jars} {jars.stat().st_mtime_ns} {java} {java.stat().st_mtime_ns}"
        name = f"spark-{pyspark.__version__}-classes-{sha256(built_from.encode()).hexdigest()[:12]}"
        archive = cached(name, partial(_archive_classes, java)) / ARCHIVE
    except (UnavailableError, CannotFillError):
        return ""
    return f"-XX:SharedArchiveFile={archive} -Xlog:cds=off"


def _archive_classes(java: Path, folder: Path) -> None:
    job = folder / "job.py"
    job.write_text(ARCHIVED_JOB)
    options = f"{QUICK_JVM} -XX:ArchiveClassesAtExit={folder / ARCHIVE} -Xlog:cds=off"
    env = {"JAVA_HOME": str(java.parents[1]), "SPARK_HOME": str(HOME), "SPARK_LOCAL_IP": HOST}
    env |= {"SPARK_SUBMIT_OPTS": options, "PYSPARK_PYTHON": sys.executable}
    run([str(HOME / "bin/spark-submit"), "--master", "local[1]", str(job)], env={**os.environ, **env})
