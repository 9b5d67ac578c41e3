"""Make the corpus: run the jobs, record what they leave. `python -m tests.spark_corpus.make [names]`."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark

from tests.spark_corpus.cases import CASES, Case
from tools.servers.spark import HOME, QUICK_JVM, SparkCluster, client_environment

HERE = Path(__file__).parent
LOGS = HERE / "logs"
SECONDS = 150
#: Beyond this a log is packed; beyond ten times this its middle is left out.
LARGE = 60_000
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": QUICK_JVM,
    "spark.executor.extraJavaOptions": QUICK_JVM,
}


def main(names: list[str]) -> None:
    cases = {case.name: case for case in CASES}
    chosen = [cases[name] for name in names] or CASES
    LOGS.mkdir(exist_ok=True)
    with ExitStack() as stack:
        cluster = None
        for case in chosen:
            if case.mode != "local" and cluster is None:
                cluster = stack.enter_context(_running_cluster())
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                meta = _record(case, Path(folder).resolve(), cluster)
            print(f"{case.name}: exit {meta['exit_code']} in {time.monotonic() - began:.0f} s", flush=True)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster and the folder in which it works."""

    spark: SparkCluster
    folder: Path

    @property
    def work(self) -> Path:
        return self.folder / "spark"


@contextmanager
def _running_cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory() as folder:
        spark = SparkCluster(cores=2, memory="1g")
        spark.start(Path(folder))
        try:
            yield Cluster(spark, Path(folder).resolve())
        finally:
            spark.stop()


def _record(case: Case, work: Path, cluster: Cluster | None) -> dict[str, Any]:
    _prepare(work)
    tmpfs = _tmpfs(work) if "{tmpfs}" in str(case.conf) else None
    try:
        exit_code, output = _run(case, work, cluster, tmpfs)
    finally:
        if tmpfs:
            subprocess.run(["umount", tmpfs], check=True)
    meta: dict[str, Any] = {
        "expected": case.expected.value,
        "why": case.why,
        "mode": case.mode,
        "exit_code": exit_code,
        "held_out": case.held_out,
        "spark": pyspark.__version__,
    }
    _write(case.name, _normalised(output, work, cluster))
    if case.mode == "cluster" and cluster is not None:
        driver_id = re.search(r"driver-\d{14}-\d{4}", output)
        if driver_id:
            meta["driver_state"] = _driver_state(cluster, driver_id.group())
            _write(f"{case.name}.driver", _normalised(_driver_log(cluster, driver_id.group()), work, cluster))
    (LOGS / f"{case.name}.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta


def _prepare(work: Path) -> None:
    with zipfile.ZipFile(work / "empty.jar", "w") as jar:
        jar.writestr("META-INF/MANIFEST.MF", "Manifest-Version: 1.0\n")
    (work / "ivy.xml").write_text(
        f'<ivysettings><settings defaultResolver="here"/><resolvers><filesystem name="here"><artifact '
        f'pattern="{work}/[artifact].[ext]"/></filesystem></resolvers></ivysettings>'
    )
    (work / "broken.py").write_text("spark = SparkSession.builder.getOrCreate(\nspark.range(3).show()\n")
    (work / "scratch").mkdir()


def _tmpfs(work: Path) -> str:
    folder = work / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=True)
    return str(folder)


def _run(case: Case, work: Path, cluster: Cluster | None, tmpfs: str | None) -> tuple[int, str]:
    scratch = cluster.work if case.mode != "local" and cluster else work / "scratch"
    env = {
        **os.environ,
        **client_environment(),
        "SCRATCH": str(scratch),
        **({"YARN_CONF_DIR": str(work)} if "yarn" in case.submit else {}),
        "PYTHONHASHSEED": "0",
    }
    process = subprocess.Popen(
        _command(case, work, cluster, tmpfs),
        cwd=work,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        if case.name == "cluster_worker_lost":
            _lose_worker(cluster)
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        _end_group(process)
    return process.returncode, output.decode(errors="replace")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing behind: Python drivers outlive the JVM that started them."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return


def _command(case: Case, work: Path, cluster: Cluster | None, tmpfs: str | None) -> list[str]:
    conf = {name: value for name, value in {**SETTINGS, **case.conf}.items() if value}
    conf.setdefault("spark.local.dir", f"{work}/scratch")
    if case.mode == "cluster":
        conf["spark.standalone.submit.waitAppCompletion"] = "true"
        conf["spark.driver.cores"] = "1"
    command = [str(HOME / "bin/spark-submit")]
    if "--master" not in case.submit:
        command += ["--master", "local[1,2]" if case.mode == "local" else cluster.spark.url if cluster else ""]
    for name, value in conf.items():
        command += ["--conf", f"{name}={value.format(work=work, tmpfs=tmpfs)}"]
    given = [one.format(work=work) for one in case.submit]
    if case.mode == "cluster":
        command += ["--deploy-mode", "cluster"]
    if case.job is None:
        return [*command, *given, *case.arguments]
    file, _, function = case.job.partition(":")
    program = [str(HERE / f"makers/{file}.py")]
    arguments = case.arguments or (function or case.name,)
    if case.mode == "cluster":
        # Standalone clusters refuse Python drivers; the class that runs them is a JVM application like any other.
        return [
            *command,
            *given,
            "--class",
            "org.apache.spark.deploy.PythonRunner",
            f"{work}/empty.jar",
            *program,
            "",
            *arguments,
        ]
    return [*command, *given, *program, *arguments]


def _lose_worker(cluster: Cluster | None) -> None:
    assert cluster is not None
    deadline = time.monotonic() + 90
    while not any("waiting" in log.read_text(errors="replace") for log in cluster.work.glob("driver-*/std*")):
        assert time.monotonic() < deadline, "the driver never ran"
        time.sleep(0.5)
    cluster.spark.kill_worker()
    cluster.spark.start_worker()


def _driver_state(cluster: Cluster, driver_id: str) -> str | None:
    state = cluster.spark.state() or {}
    drivers = [*state.get("completeddrivers", []), *state.get("activedrivers", [])]
    return next((str(one["state"]) for one in drivers if one["id"] == driver_id), None)


def _driver_log(cluster: Cluster, driver_id: str) -> str:
    folder = cluster.work / driver_id
    return "".join(
        (folder / name).read_text(errors="replace") for name in ("stdout", "stderr") if (folder / name).exists()
    )


def _normalised(text: str, work: Path, cluster: Cluster | None) -> str:
    places = {str(work): "/job", str(HERE / "makers"): "/jobs", str(HOME): "/opt/spark", sys.prefix: "/opt/python"}
    places |= {
        sys.base_prefix: "/usr/python",
        str(HERE.parents[1]): "/repo",
        str(Path.home()): "/home/etl",
        socket.gethostname(): "driver-host",
    }
    if cluster is not None:
        places[str(cluster.folder)] = "/cluster"
    for place in sorted(places, key=len, reverse=True):
        pattern = rf"\b{re.escape(place)}\b" if place.isalnum() else re.escape(place)
        text = re.sub(pattern, places[place], text)
    text = re.sub(r"(127\.0\.0\.1|localhost|driver-host)([:/])[1-6]\d{4}\b", r"\g<1>\g<2>40000", text)
    text = re.sub(r"on port \d{4,5}", "on port 40000", text)
    return re.sub(r"(?i)\bpid[ =:]+\d+", "pid 4000", text)


def _write(name: str, text: str) -> None:
    for old in (LOGS / f"{name}.log", LOGS / f"{name}.log.gz"):
        old.unlink(missing_ok=True)
    if len(text) > 10 * LARGE:
        text = f"{text[: 5 * LARGE]}\n... the middle is left out ...\n{text[-5 * LARGE :]}"
    if len(text) > LARGE:
        (LOGS / f"{name}.log.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        (LOGS / f"{name}.log").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
