"""DataFrames written to a Kafka with logins and certificates, and no secret in anything that Spark shows."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka.admin import (
    AclOperation,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.domain.exceptions import BrokerError
from airflow_delay_provider.spark.kafka_sink import write_to_inbox
from tests.certificates import Authority
from tests.kafkas import USERS, fresh_topic, grant, read_all, secured_broker
from tests.sparks import CONF, JOBS
from tools.servers.kafka import Kafka
from tools.servers.spark import HOME, SparkCluster, client_environment

# A broker of its own, and submits to a cluster, take their time on a busy machine.
pytestmark = pytest.mark.timeout(900)
#: Of ``admin`` with SCRAM: it has all that JAAS, properties files and Kafka's references treat in their own way.
AWKWARD = 's3cret "x"; \\n${file:/etc/passwd:root} = # ü' + "'"
ROWS = 1000


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Kafka]:
    with secured_broker(tmp_path_factory.mktemp("secured"), authority) as broker:
        how = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        with AdminClient({"bootstrap.servers": broker.bootstrap}) as admin:
            changed = UserScramCredentialUpsertion("admin", how, AWKWARD.encode())
            for done in admin.alter_user_scram_credentials([changed]).values():
                done.result(60)
        yield broker


class Ladder:
    """A ladder in the secured broker, and connections to it."""

    def __init__(self, secured: Kafka, authority: Authority, folder: Path) -> None:
        self.secured = secured
        self.authority = authority
        self._folder = folder
        self.settings = {"ladder": f"secured-{uuid4().hex[:8]}", "partitions": 2}
        self.channel = fresh_topic(secured.bootstrap)

    @property
    def inbox(self) -> str:
        return f"delay.v1.{self.settings['ladder']}.inbox"

    def connection(self, listener: str, extra: dict[str, Any], **more: Any) -> str:
        """Return a file with a connection."""
        host = self.secured.bootstrap_of(listener)
        settings = {**self.settings, "ssl.ca.location": str(self.authority.file), **extra}
        file = self._folder / f"{uuid4().hex}.json"
        file.write_text(json.dumps({"stream": {"conn_type": "delay_kafka", "host": host, "extra": settings, **more}}))
        return str(file)

    @contextmanager
    def created(self) -> Iterator[KafkaBroker]:
        with KafkaBroker(KafkaConfig.from_settings(self.settings, host=self.secured.bootstrap)) as broker:
            broker.create_topology()
            yield broker

    def count(self, n: int) -> int:
        return len(read_all(self.secured.bootstrap, self.inbox, n))


@pytest.fixture
def ladder(secured: Kafka, authority: Authority, tmp_path: Path) -> Ladder:
    return Ladder(secured, authority, tmp_path)


@pytest.fixture
def rows(spark: SparkSession) -> DataFrame:
    return spark.range(10).select(f.lit("x").alias("payload"), f.lit(3600).alias("deliver_after"))


@pytest.mark.parametrize(("mechanism", "password"), [("PLAIN", USERS["admin"]), ("SCRAM-SHA-256", AWKWARD)])
def test_a_login_is_carried_to_the_java_client(rows: DataFrame, ladder: Ladder, mechanism: str, password: str) -> None:
    file = ladder.connection("SASL_SSL", {"sasl.mechanism": mechanism}, login="admin", password=password)
    assert write_to_inbox(rows, "stream", connection_file=file, channel=ladder.channel).scheduled == 10
    assert ladder.count(10) == 10


def test_a_client_certificate_is_carried_to_the_java_client(rows: DataFrame, ladder: Ladder) -> None:
    certificate, key = ladder.authority.issue("admin")
    files = {"ssl.certificate.location": str(certificate), "ssl.key.location": str(key)}
    file = ladder.connection("SSL", files)
    assert write_to_inbox(rows, "stream", connection_file=file, channel=ladder.channel).scheduled == 10
    assert ladder.count(10) == 10


def test_what_kafka_refuses_is_said_in_one_sentence(rows: DataFrame, ladder: Ladder) -> None:
    user = f"user-{uuid4().hex[:12]}"
    certificate, key = ladder.authority.issue(user)
    files = {"ssl.certificate.location": str(certificate), "ssl.key.location": str(key)}
    file = ladder.connection("SSL", files)
    see = AclOperation.DESCRIBE
    grant(ladder.secured, user, ResourceType.TOPIC, "delay.v1.", see, pattern=ResourcePatternType.PREFIXED)
    grant(ladder.secured, user, ResourceType.TOPIC, ladder.channel, see, AclOperation.WRITE)
    with (
        ladder.created(),
        pytest.raises(BrokerError, match=r"\(TopicAuthorizationException: Not authorized to access topics: \[delay"),
    ):
        write_to_inbox(rows, "stream", connection_file=file, channel=ladder.channel)


# -- secrets -------------------------------------------------------------------------------------------------------


def submit(master: str, arguments: list[str], folder: Path, jars: str | None, **conf: str) -> tuple[int, str]:
    """Run the job that shows all that Spark shows; return its exit code and output."""
    settings = {**CONF, **conf}
    command = [str(HOME / "bin/spark-submit"), "--master", master, *(["--jars", jars] if jars else [])]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    path = os.pathsep.join([str(JOBS.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(JOBS / "write_to_inbox.py"), *arguments, str(folder)],
        env={**os.environ, **client_environment(), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("kind", ["local", "cluster"])
def test_no_secret_is_in_anything_that_spark_shows(
    request: pytest.FixtureRequest, ladder: Ladder, kafka_connector: str, tmp_path: Path, kind: str
) -> None:
    shown = tmp_path / "shown"
    (shown / "events").mkdir(parents=True)
    cluster: SparkCluster | None = request.getfixturevalue("cluster") if kind == "cluster" else None
    file = ladder.connection("SASL_SSL", {"sasl.mechanism": "PLAIN"}, login="admin", password=USERS["admin"])

    code, output = submit(
        "local[2]" if cluster is None else cluster.url,
        [file, ladder.channel],
        shown,
        kafka_connector,
        **{
            "spark.cores.max": "2",
            "spark.eventLog.dir": str(shown / "events"),
            "spark.eventLog.enabled": "true",
            "spark.ui.enabled": "true",
        },
    )

    assert code == 0, output[-3000:]
    assert output.count(f"rows={ROWS}, scheduled={ROWS - 1}, rejected=1") == 2
    assert ladder.count(2 * (ROWS - 1)) == 2 * (ROWS - 1)
    (shown / "output").write_text(output)
    logs = [] if cluster is None else cluster.executor_files("std*")
    files = [each for each in [*shown.rglob("*"), *logs] if each.is_file()]
    contents = {each: each.read_bytes() for each in files}
    # What it is searched in is what it says to be.
    for part in ("page-", "events", "rejects", *(["stderr"] if cluster else [])):
        assert any(part in str(each) and content for each, content in contents.items()), part
    assert any(b"sasl.jaas.config" in content for content in contents.values())
    assert any(b"SparkListenerApplicationStart" in content for content in contents.values()), (
        "the event log is readable"
    )
    assert [str(each) for each, content in contents.items() if USERS["admin"].encode() in content] == []
    kept = [] if cluster is None else cluster.executor_files("kafka-*.properties")
    assert (len(kept) > 0) is (cluster is not None)
    assert [oct(each.stat().st_mode) for each in kept if each.stat().st_mode & 0o066] == []


def test_a_job_without_the_connector_says_how_to_get_it(ladder: Ladder, tmp_path: Path) -> None:
    file = ladder.connection("SASL_SSL", {}, login="admin", password=USERS["admin"])
    code, output = submit("local[1]", [file, ladder.channel], tmp_path, None)
    assert code == 1
    assert "spark.jars: Spark cannot use its Kafka connector: it is not there; fetch the jars once" in output
