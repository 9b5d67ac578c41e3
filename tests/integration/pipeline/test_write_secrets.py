"""The password of a connection is in nothing that Spark keeps or shows."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from sqlalchemy.engine import make_url

from tests import rabbits
from tests.certificates import Authority
from tests.integration.pipeline.targets import target_of
from tests.kafkas import USERS, fresh_topic, secured_broker
from tests.rabbits import require_rabbitmq
from tests.sparks import CONF, JOBS
from tools.servers.spark import HOST, SparkCluster, client_environment

PLANTED = "planted-passw0rd-4711"
PAGES = 15


@pytest.mark.timeout(600)
def test_a_password_is_nowhere_to_be_found(postgres_url: str, tmp_path: Path):
    """One connection is in a file and works, but for a bad row; that of the environment has a wrong password."""
    shown, events, spark_home = (tmp_path / name for name in ("shown", "events", "spark"))
    for folder in (shown, events, spark_home):
        folder.mkdir()
    # The server trusts its clients, and so takes any password.
    url = make_url(postgres_url).set(password=PLANTED).render_as_string(hide_password=False)
    good = target_of("postgresql", tmp_path / "spark", {"conn_type": "delay", "extra": {"ledger_url": url}}, "orders")
    parts = urlsplit(require_rabbitmq())
    wrong = rabbits.connection_of(parts._replace(netloc=f"guest:{PLANTED}@{parts.hostname}:{parts.port}").geturl())
    keep = {"onRejects": "keep", "rejects": str(shown / "rejects"), "report": str(shown / "report.json")}
    plan = [good.options | keep, good.options, {"connection": "wrong_password", "channel": "orders"}]
    local = {"spark.local.dir": str(spark_home)}
    output = submit("local[2]", plan, shown, events, local, AIRFLOW_CONN_WRONG_PASSWORD=json.dumps(wrong))
    rejected, refused = json.loads((shown / "failures.json").read_text())
    assert "1 of 20 rows were rejected (priority 1)" in rejected
    assert "guest" in refused
    found = read_all([shown, events]) | output
    require_content(found, events)
    assert len(list((shown / "rejects").iterdir())) == 1
    assert places_of(PLANTED, found) == []


@pytest.mark.timeout(900)
def test_the_logins_of_writes_that_succeed_are_nowhere_to_be_found(cluster: SparkCluster, tmp_path: Path):
    """Also not in what executors write down; they log in to both brokers."""
    shown, events = tmp_path / "shown", tmp_path / "events"
    for folder in (shown, events):
        folder.mkdir()
    authority = Authority(tmp_path)
    with (
        secured_broker(tmp_path, authority) as kafka,
        rabbits.user(require_rabbitmq(), configure=".*", write=".*", read=".*") as url,
    ):
        queue = f"test-{uuid4().hex}"
        rabbits.declare_queue(url, queue, **{"x-queue-type": "quorum"})
        settings = {"ladder": f"secrets-{uuid4().hex[:8]}", "partitions": 2, "sasl.mechanism": "PLAIN"}
        settings["ssl.ca.location"] = str(authority.file)
        login = {"login": "admin", "password": USERS["admin"]}
        sasl = {"conn_type": "delay_kafka", "host": kafka.bootstrap_of("SASL_SSL"), "extra": settings, **login}
        targets = [
            target_of("rabbitmq", tmp_path, rabbits.connection_of(url), queue),
            target_of("kafka", tmp_path, sasl, fresh_topic(kafka.bootstrap)),
        ]
        plan = []
        for target in targets:
            kept = {"rejects": f"{shown}/rejects-{target.broker}", "report": f"{shown}/report-{target.broker}.json"}
            plan.append({**target.options, **kept, "onRejects": "keep"})
        output = submit(cluster.url, plan, shown, events, {"spark.cores.max": "2"})
        assert [len(target.received(19)) for target in targets] == [19, 19]
    assert json.loads((shown / "failures.json").read_text()) == []
    # They run in the session's cluster, and so do other tests.
    executors = {file: file.read_text(errors="replace") for file in cluster.executor_files("std*")}
    found = read_all([shown, events]) | output | executors
    require_content(found, events)
    assert any("delay_pipeline" in text for text in output.values())
    for target in targets:
        assert len(list((shown / f"rejects-{target.broker}").iterdir())) == 1
    assert any("TaskSetManager" in text or "Executor" in text for text in executors.values())
    assert places_of(rabbits.SECRET, found) == []
    assert places_of(USERS["admin"], found) == []


def submit(
    master: str, plan: Sequence[dict[str, str]], shown: Path, events: Path, conf: dict[str, str], **env: str
) -> dict[Path, str]:
    """Write as planned; return what the driver has printed."""
    (shown.parent / "plan.json").write_text(json.dumps(plan))
    settings = {
        **CONF,
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.driver.bindAddress": HOST,
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{events}",
        "spark.log.level": "INFO",
        **conf,
    }
    command = ["spark-submit", "--master", master]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    done = subprocess.run(
        [*command, str(JOBS / "schedule_and_show.py"), str(shown.parent / "plan.json"), str(shown)],
        env={**os.environ, **client_environment(), **env},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return {Path("stdout"): done.stdout, Path("stderr"): done.stderr}


def read_all(folders: Sequence[Path]) -> dict[Path, str]:
    """Return all files in these folders."""
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return {file: file.read_text(errors="replace") for file in files}


def require_content(found: dict[Path, str], events: Path) -> None:
    """Of the things that are searched, none is empty."""
    assert sum(file.suffix == ".html" for file in found) == PAGES
    assert any("AppendData" in text for file, text in found.items() if file.is_relative_to(events))
    assert any("AppendData" in text for file, text in found.items() if file.suffix == ".html")


def places_of(secret: str, found: dict[Path, str]) -> list[str]:
    return [str(file) for file, text in found.items() if secret in text]
