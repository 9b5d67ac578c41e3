"""The lateness job over a real run on all three brokers, beside an independent count."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import SparkSession
from sqlalchemy import text

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.domain.lifecycle import JournalEntry
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.spark.jobs import lateness
from airflow_delay_provider.spark.jobs.lateness_folder import ReportFolder
from tests.integration.pipeline.reading import NAME, write_connection
from tests.integration.pipeline.three_brokers import ALL, LEDGER, RABBIT, STREAM, ThreeBrokers, three_brokers

pytestmark = pytest.mark.timeout(600)
KEYS = ["connection", "channel", "hour"]
COUNTED = ("scheduled", "dispatched", "cancelled", "dead_lettered", "requeued")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeBrokers]:
    with three_brokers(tmp_path_factory.mktemp("brokers")) as running:
        yield running


def run(output: Path, file: str | Path, *more: str, connections: Sequence[str] = (NAME,)) -> int:
    named = [word for name in connections for word in ("--connection", name)]
    return lateness.main(["--output", str(output), "--connection-file", str(file), *named, *more])


def hourly(output: Path) -> pd.DataFrame:
    return pd.read_parquet(output / "hourly").sort_values(KEYS, ignore_index=True)


def entries(output: Path) -> pd.DataFrame:
    """The entries of the runs that count."""
    state = json.loads((output / "state.json").read_text())
    runs = [output / "journal" / f"run={each['id']}" for each in state["runs"]]
    return pd.concat([pd.read_parquet(each) for each in runs], ignore_index=True)


# -- three brokers ---------------------------------------------------------------------------------------------------


def test_the_report_over_three_brokers_equals_an_independent_count(
    scene: ThreeBrokers, spark: SparkSession, tmp_path: Path
) -> None:
    """M10: counted from what each broker reports itself, without Spark, in pandas."""
    channels = {name: [scene.channel(name, f"{name}-{each}") for each in ("a", "b")] for name in ALL}
    for name in ALL:
        send(scene, name, channels[name])
    settle(scene, channels[LEDGER][0])
    journals = read_all(scene)

    assert run(tmp_path, scene.connection_file, connections=ALL) == lateness.OK

    found, expected = hourly(tmp_path), count_independently(journals)
    assert found[KEYS].to_dict("records") == expected[KEYS].to_dict("records")
    for name in COUNTED:
        assert found[name].tolist() == expected[name].tolist(), name
    timed = found["connection"] != RABBIT
    for name in ("p50_ms", "p95_ms", "p99_ms", "max_ms"):
        assert found[timed][name].tolist() == pytest.approx(expected[timed][name].tolist(), nan_ok=True), name
    # RabbitMQ 3.10 does not tell when it dispatched, and that is said.
    rabbit = found[~timed]
    assert rabbit["untimed"].tolist() == rabbit["dispatched"].tolist()
    assert rabbit["p50_ms"].isna().all()
    assert (found["early"].sum(), found["duplicates"].sum()) == (0, 0)
    page = (tmp_path / "report.html").read_text()
    assert "RabbitMQ before 4.0 does not record when it dispatched a message" in page
    assert "the customer &lt;unknown&gt; is closed" in page
    assert "<td>unknown</td>" in page


def send(scene: ThreeBrokers, connection: str, channels: Sequence[str]) -> None:
    broker = scene.brokers[connection]
    now = broker.clock.now()
    messages = [
        Message(channel=channels[n % 2], payload=b"x", deliver_at=now + timedelta(milliseconds=2000 + 40 * n))
        for n in range(40)
    ]
    waiting = [Message(channel=channels[0], payload=b"x", deliver_at=now + timedelta(hours=1)) for _ in range(3)]
    broker.schedule([*messages, *waiting])
    if broker.can_recall:
        broker.cancel([message.id for message in waiting])


def settle(scene: ThreeBrokers, channel: str) -> None:
    """Give up one message and put another one back, as consumers do."""
    scene.wait_for_changes(LEDGER, dispatched=40)
    broker = scene.brokers[LEDGER]
    first, second = broker.receive(channel, limit=2)
    broker.dead_letter(first, channel=f"{channel}.dead", reason="the customer <unknown> is closed")
    broker.requeue(second, timedelta(milliseconds=100))


def read_all(scene: ThreeBrokers) -> dict[str, list[JournalEntry]]:
    """Return what each broker reports itself, once everything has happened."""
    return {
        LEDGER: scene.wait_for_changes(LEDGER, dispatched=41, cancelled=3, dead_lettered=1, requeued=1),
        RABBIT: scene.wait_for_changes(RABBIT, dispatched=40),
        STREAM: scene.wait_for_changes(STREAM, dispatched=40, cancelled=3),
    }


def count_independently(journals: Mapping[str, Sequence[JournalEntry]]) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for name, entries_of_broker in journals.items():
        for entry in entries_of_broker:
            is_rabbit_dispatch = name == RABBIT and entry.change == "dispatched"
            # Its time is unknown to Spark, which then takes the due time to find the hour.
            moment = entry.deliver_at if is_rabbit_dispatch else entry.at
            late = entry.at - entry.deliver_at if entry.change == "dispatched" else None
            rows.append(
                {
                    "connection": name,
                    "channel": entry.channel,
                    "hour": moment.replace(minute=0, second=0, microsecond=0, tzinfo=None),
                    "change": entry.change.value,
                    "late_ms": None if late is None else late / timedelta(milliseconds=1),
                }
            )
    frame = pd.DataFrame(rows)
    frame["hour"] = frame["hour"].astype("datetime64[us]")
    counts = pd.crosstab([frame[key] for key in KEYS], frame["change"]).reindex(columns=COUNTED, fill_value=0)
    late_ms = frame.groupby(KEYS)["late_ms"]
    for name, share in (("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99), ("max_ms", 1.0)):
        counts[name] = late_ms.quantile(share)
    return counts.reset_index().sort_values(KEYS, ignore_index=True)


# -- days of a ledger ------------------------------------------------------------------------------------------------

DAY = datetime(2026, 3, 1, tzinfo=UTC)
_INSERT = text(
    "INSERT INTO delay_event (xid, message_seq, message_id, channel, change, at_ms, deliver_at_ms, reason)"
    " VALUES (0, 0, :id, :channel, :change, :at, :due, :reason)"
)


@pytest.fixture
def events(sqlite_url: str) -> Iterator[Ledger]:
    ledger = Ledger(sqlite_url)
    ledger.migrate()
    yield ledger
    ledger.close()


@pytest.fixture
def file(sqlite_url: str, tmp_path: Path) -> str:
    return write_connection(tmp_path, sqlite_url)


def record(ledger: Ledger, message_id: str, change: str, at: datetime, *, late_ms: int = 0, **more: str | None) -> None:
    at_ms = round(at.timestamp() * 1000)
    row = {"id": message_id, "channel": "orders", "change": change, "at": at_ms, "due": at_ms - late_ms, "reason": None}
    with ledger.engine.execution_options(writes=True).begin() as connection:
        connection.execute(_INSERT, row | more)


def fill_day(ledger: Ledger, day: datetime, count: int) -> None:
    for number in range(count):
        at = day + timedelta(minutes=1 + 7 * number)
        record(ledger, f"{day:%d}-{number}", "scheduled", at - timedelta(seconds=30))
        record(ledger, f"{day:%d}-{number}", "dispatched", at, late_ms=number * 100)


def test_the_second_day_reads_only_the_second_day(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    fill_day(events, DAY + timedelta(hours=1), 10)
    assert run(output, file) == lateness.OK
    first = {path: path.stat().st_mtime_ns for path in (output / "hourly").rglob("*.parquet")}
    fill_day(events, DAY + timedelta(days=1, hours=1), 6)
    capsys.readouterr()

    assert run(output, file) == lateness.OK

    assert "12 new entries of 1 days" in capsys.readouterr().out
    assert [each["entries"] for each in json.loads((output / "state.json").read_text())["runs"]] == [20, 12]
    assert len(entries(output)) == len(entries(output)["position"].unique()) == 32
    # The figures of the first day are the same files.
    assert {path: path.stat().st_mtime_ns for path in first} == first
    assert hourly(output)["dispatched"].sum() == 16


def test_a_late_entry_of_an_earlier_day_changes_the_figures_of_that_day(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    fill_day(events, DAY + timedelta(hours=1), 3)
    fill_day(events, DAY + timedelta(days=1, hours=1), 3)
    run(output, file)
    record(events, "forgotten", "dispatched", DAY + timedelta(hours=1, minutes=1), late_ms=9000)

    run(output, file)

    figures = hourly(output)
    assert figures["dispatched"].tolist() == [4, 3]
    assert figures["max_ms"].tolist() == [9000, 200]
    assert figures["late"].tolist() == [1, 0]


def test_a_crash_between_data_and_state_loses_and_doubles_nothing(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    fill_day(events, DAY + timedelta(hours=1), 5)
    run(output, file)
    before = (output / "state.json").read_text()
    fill_day(events, DAY + timedelta(hours=5), 5)

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(ReportFolder, "commit", crash)
        with pytest.raises(KeyboardInterrupt):
            run(output, file)
    assert (output / "state.json").read_text() == before
    assert len(list((output / "journal").glob("run=*"))) == 2
    fill_day(events, DAY + timedelta(hours=9), 5)

    assert run(output, file) == lateness.OK

    assert len(list((output / "journal").glob("run=*"))) == 2
    assert len(entries(output)) == len(entries(output)["position"].unique()) == 30
    assert hourly(output)["dispatched"].sum() == 15


def test_duplicates_are_dispatches_beyond_the_first_and_the_requeues(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path
) -> None:
    for minute, (message, change) in enumerate(
        [
            ("twice", "dispatched"),
            ("twice", "dispatched"),
            ("requeued", "dispatched"),
            ("requeued", "requeued"),
            ("requeued", "dispatched"),
            ("both", "dispatched"),
            ("both", "requeued"),
            ("both", "dispatched"),
            ("both", "dispatched"),
            ("once", "dispatched"),
        ]
    ):
        record(events, message, change, DAY + timedelta(hours=2, minutes=minute))
    # The second dispatch is on the next day, in the next run.
    run(tmp_path / "out", file)
    record(events, "once", "dispatched", DAY + timedelta(days=1, hours=2))
    run(tmp_path / "out", file)

    assert hourly(tmp_path / "out")["duplicates"].tolist() == [2, 1]


def test_early_dispatches_missed_targets_and_hostile_names_are_shown(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    hostile = "<script>alert('x')</script>|$a_b$"
    at = DAY + timedelta(hours=3)
    record(events, "early", "dispatched", at, late_ms=-1, channel=hostile)
    record(events, "late", "dispatched", at, late_ms=60_000, channel=hostile)
    record(events, "dead", "dead_lettered", at, channel=hostile, reason="</td><img src=x onerror=alert(1)>\n| a | b |")

    assert run(output, file) == lateness.OK
    assert run(output, file, "--fail-on-slo") == lateness.SLO_MISSED
    assert run(output, file, "--fail-on-slo", "--slo-seconds", "60") == lateness.OK

    assert hourly(output)[["early", "late", "dead_lettered"]].to_dict("records") == [
        {"early": 1, "late": 0, "dead_lettered": 1}
    ]
    page, markdown = (output / "report.html").read_text(), (output / "report.md").read_text()
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;" in page
    assert "<script" not in markdown.replace("\\<script", "")
    assert sorted(path.name for path in (output / "plots").iterdir()) == [
        "distribution.svg",
        "hours.svg",
        "traffic.svg",
    ]
    assert "<script>" not in (output / "plots" / "hours.svg").read_text()


def test_full_reads_the_journal_again_and_replaces_everything(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    fill_day(events, DAY, 3)
    fill_day(events, DAY + timedelta(days=1), 3)
    run(output, file)
    with events.engine.execution_options(writes=True).begin() as connection:
        limit = round((DAY + timedelta(hours=23)).timestamp() * 1000)
        connection.execute(text("DELETE FROM delay_event WHERE at_ms < :limit"), {"limit": limit})

    assert run(output, file, "--full") == lateness.OK

    assert len(entries(output)) == 6
    assert len(list((output / "journal").glob("run=*"))) == 1
    assert {str(each) for each in hourly(output)["hour"].dt.date} == {"2026-03-02"}


def test_an_empty_journal_gives_an_empty_report(events: Ledger, file: str, spark: SparkSession, tmp_path: Path) -> None:
    assert run(tmp_path / "out", file) == lateness.OK
    assert "The journals have no entries yet." in (tmp_path / "out" / "report.html").read_text()


def test_a_journal_that_is_named_twice_is_refused(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    connections = json.loads(Path(file).read_text())
    Path(file).write_text(json.dumps(connections | {"other": connections[NAME]}))

    assert run(tmp_path / "out", file, connections=(NAME, "other")) == lateness.FAILED
    assert "error: connection: 'ledger' and 'other' have the same journal" in capsys.readouterr().err
    assert not (tmp_path / "out" / "state.json").exists()


def test_a_connection_that_is_missing_fails_with_its_name(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "out", file, connections=("nowhere",)) == lateness.FAILED
    assert "has no connection 'nowhere'; export it, too" in capsys.readouterr().err


def test_runs_at_the_same_time_do_not_overwrite_each_other(
    events: Ledger,
    file: str,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    fill_day(events, DAY, 2)
    commit = ReportFolder.commit
    state = '{"version": 1, "slo_seconds": 5.0, "positions": {}, "runs": []}'

    def commit_late(folder: ReportFolder, *args: Any, **kwargs: Any) -> None:
        folder.write("state.json", state.encode())
        commit(folder, *args, **kwargs)

    monkeypatch.setattr(ReportFolder, "commit", commit_late)

    assert run(output, file) == lateness.FAILED
    assert "another run has written to" in capsys.readouterr().err
    assert (output / "state.json").read_text() == state
