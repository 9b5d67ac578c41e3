"""What all tests share: an Airflow home of their own, and ledgers on SQLite and PostgreSQL."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from airflow_delay_provider.brokers.ledger import migrations
from tests.databases import EmptiedDatabases, fresh_database, quick_sqlite_migrations, real_upgrade

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.ledger.database import Ledger

# Airflow reads these when it is first imported, which is after this file.
_HOME = tempfile.mkdtemp(prefix="delay-airflow-home-")
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
os.environ["AIRFLOW_HOME"] = _HOME
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
os.environ.pop("AIRFLOW__DELAY__LEDGER_URL", None)

settings.register_profile("delay", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("delay")

RABBITMQ_VERSIONS = ("rabbitmq3", "rabbitmq4")
#: Tests that share one Airflow, or one Spark session.
SHARING = {
    "the Airflow that runs Spark jobs": re.compile(r"acceptance/test_spark_"),
    "the Airflow that uses brokers": re.compile(r"acceptance/test_\w*_airflow"),
    "the Airflow that people use in a browser": re.compile(r"tests/browser/"),
    "the Airflow that serves the HTTP API": re.compile(r"integration/test_api_"),
    "the Spark session of the pipeline": re.compile(r"integration/pipeline/test_(?!dispatch)"),
}
#: Tests of one file that use the same RabbitMQ and the same type of queue.
ON_RABBITMQ = re.compile(r"\[.*(rabbitmq[34](?:-quorum|-classic)?)")
#: Files whose tests mostly wait: two workers share each.
PATIENT = re.compile(r"contract/test_.*(rabbitmq|kafka)")
#: What keeps processors busy, the longest first.
BUSY = [
    *SHARING,
    "tests/integration/pipeline/",
    "tests/acceptance/test_demo.py",
    "tests/acceptance/test_killed_kafka.py",
    "tests/integration/test_spark",
    "tests/integration/test_kafka",
]
#: What mostly waits, the longest last.
WAITING = [
    "tests/integration/",
    "tests/acceptance/",
    "tests/integration/test_rabbitmq",
    "tests/contract/",
    "tests/contract/test_kafka.py",
    "tests/acceptance/test_killed_rabbitmq.py",
    "tests/contract/test_rabbitmq.py",
]
#: So many workers begin with what keeps processors busy: as many as there are processors, here and on CI.
BUSY_WORKERS = 2


def group_of(nodeid: str) -> str:
    """Return the group of a test; one worker runs all tests of a group."""
    file = nodeid.split("::")[0]
    for shared, files in SHARING.items():
        if files.search(file):
            return shared
    group = file
    if rabbitmq := ON_RABBITMQ.search(nodeid):
        group = f"{group} on {rabbitmq[1]}"
    return f"{group}, half {crc32(nodeid.encode()) % 2}" if PATIENT.search(file) else group


class ByGroup(LoadScopeScheduling):
    """Some workers run groups from the front of the queue, which are busy; the others from its end, which wait."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node not in self.nodes[:BUSY_WORKERS]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByGroup:
    config.option.loadscopereorder = False
    return ByGroup(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank_of(group_of(item.nodeid)))


def rank_of(group: str) -> int:
    """Return the place of a group in the queue: busy ones first, then unit tests and the like, then those that wait."""
    busy = [n for n, start in enumerate(BUSY) if group.startswith(start)]
    waiting = [n for n, start in enumerate(WAITING) if group.startswith(start)]
    return busy[0] if busy else len(BUSY) + (waiting[-1] + 1 if waiting else 0)


@pytest.fixture(scope="module", params=RABBITMQ_VERSIONS)
def rabbitmq_version(request: pytest.FixtureRequest) -> Iterator[str]:
    """The version of the RabbitMQ that ``tests.rabbits`` is about, each in turn; fixtures that use it ask for this."""
    from tests.rabbits import under_test

    with under_test(request.param):
        yield request.param


@pytest.fixture(scope="module", params=["rabbitmq3-quorum", "rabbitmq3-classic", "rabbitmq4-quorum"])
def queue_type(request: pytest.FixtureRequest) -> Iterator[str]:
    """The type of the queues that messages are sent to: quorum on each version of RabbitMQ, classic on the oldest."""
    from tests.rabbits import under_test

    version, _, kind = request.param.partition("-")
    with under_test(version):
        yield kind


@pytest.fixture(scope="session")
def migrated_postgres() -> Iterator[str]:
    """A migrated database that others are copied from; no client stays connected to it."""
    from airflow_delay_provider.brokers.ledger.database import Ledger

    with fresh_database() as url:
        ledger = Ledger(url)
        ledger.migrate()
        ledger.close()
        yield url


@pytest.fixture(scope="session", autouse=True)
def _quick_sqlite_migrations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_sqlite_migrations(tmp_path_factory.mktemp("migrated")):
        yield


@pytest.fixture
def real_migrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Alembic create the tables of new SQLite files too."""
    monkeypatch.setattr(migrations, "upgrade", real_upgrade)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture(scope="session")
def emptied_databases(migrated_postgres: str) -> Iterator[EmptiedDatabases]:
    databases = EmptiedDatabases(migrated_postgres)
    yield databases
    databases.drop_all()


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A migrated PostgreSQL database that is as good as new."""
    # Asked for only now: without a server, tests on SQLite still run.
    databases: EmptiedDatabases = request.getfixturevalue("emptied_databases")
    with databases.lend() as url:
        yield url


@pytest.fixture
def empty_postgres_url() -> Iterator[str]:
    """A fresh PostgreSQL database without our tables."""
    with fresh_database() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest) -> str:
    """The URL of a fresh ledger, ready to use, once on each database."""
    url: str = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")
    return url


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    """A fresh ledger, once on each database."""
    from airflow_delay_provider.brokers.ledger.database import Ledger

    opened = Ledger(ledger_url)
    yield opened
    opened.close()
