"""The password of a connection is in nothing that Spark keeps or shows."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sqlalchemy.engine import make_url

from tests import rabbits
from tests.integration.pipeline.targets import target_of
from tests.rabbits import require_rabbitmq
from tests.sparks import CONF, JOBS
from tools.servers.spark import HOST, client_environment

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
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    settings = CONF | {
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.driver.bindAddress": HOST,
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{events}",
        "spark.log.level": "INFO",
        "spark.local.dir": str(spark_home),
    }
    command = ["spark-submit", "--master", "local[2]"]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    done = subprocess.run(
        [*command, str(JOBS / "schedule_and_show.py"), str(tmp_path / "plan.json"), str(shown)],
        env={**os.environ, **client_environment(), "AIRFLOW_CONN_WRONG_PASSWORD": json.dumps(wrong)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    rejected, refused = json.loads((shown / "failures.json").read_text())
    assert "1 of 20 rows were rejected (priority 1)" in rejected
    assert "guest" in refused
    found = {
        file: file.read_text(errors="replace") for file in [*shown.rglob("*"), *events.rglob("*")] if file.is_file()
    }
    # Of the things that are searched, none is empty.
    assert sum(file.suffix == ".html" for file in found) == PAGES
    assert any("AppendData" in text for file, text in found.items() if file.is_relative_to(events))
    assert any("AppendData" in text for file, text in found.items() if file.suffix == ".html")
    assert len(list((shown / "rejects").iterdir())) == 1
    found |= {Path("stdout"): done.stdout, Path("stderr"): done.stderr}
    assert [str(file) for file, text in found.items() if PLANTED in text] == []
