"""The lateness job over a real run on all three brokers, beside an independent count."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import SparkSession
from sqlalchemy import text

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.lifecycle import JournalEntry
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.spark.failures import Evidence, Verdict, classify
from airflow_delay_provider.spark.jobs import lateness
from airflow_delay_provider.spark.jobs.command import ExitCode
from airflow_delay_provider.spark.jobs.lateness_folder import FolderState, ReportFolder
from airflow_delay_provider.spark.jobs.lateness_report import ReportOptions, gather
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


def state_of(output: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((output / "state.json").read_text())
    return state


def hourly(output: Path) -> pd.DataFrame:
    """The figures that count."""
    days = [output / "hourly" / f"run={run}" / f"day={day}" for day, run in state_of(output)["figures"].items()]
    found = pd.concat([pd.read_parquet(each) for each in days], ignore_index=True)
    return found.sort_values(KEYS, ignore_index=True)


def entries(output: Path) -> pd.DataFrame:
    """The entries of the runs that count."""
    runs = [output / "journal" / f"run={each['id']}" for each in state_of(output)["runs"]]
    return pd.concat([pd.read_parquet(each) for each in runs], ignore_index=True)


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


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

    assert run(tmp_path, scene.connection_file, connections=ALL) == ExitCode.OK

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

DAY = datetime(2025, 3, 1, tzinfo=UTC)
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
    assert run(output, file) == ExitCode.OK
    first = {path: path.stat().st_mtime_ns for path in (output / "hourly").rglob("*.parquet")}
    fill_day(events, DAY + timedelta(days=1, hours=1), 6)
    capsys.readouterr()

    assert run(output, file) == ExitCode.OK

    assert "12 new entries of 1 days" in capsys.readouterr().out
    assert [each["entries"] for each in state_of(output)["runs"]] == [20, 12]
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

    with monkeypatch.context() as broken:
        broken.setattr(ReportFolder, "commit", stop)
        assert run(output, file) == ExitCode.INTERRUPTED
    assert (output / "state.json").read_text() == before
    assert len(list((output / "journal").glob("run=*"))) == 2
    fill_day(events, DAY + timedelta(hours=9), 5)

    assert run(output, file) == ExitCode.OK

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

    assert run(output, file) == ExitCode.OK
    assert run(output, file, "--fail-on-slo") == ExitCode.SLO_MISSED
    assert run(output, file, "--fail-on-slo", "--slo-seconds", "60") == ExitCode.OK

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
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    fill_day(events, DAY, 3)
    fill_day(events, DAY + timedelta(days=1), 3)
    run(output, file)
    with events.engine.execution_options(writes=True).begin() as connection:
        limit = round((DAY + timedelta(hours=23)).timestamp() * 1000)
        connection.execute(text("DELETE FROM delay_event WHERE at_ms < :limit"), {"limit": limit})

    assert run(output, file, "--full") == ExitCode.OK

    assert "warning: --full replaces 12 entries of 2 days by what the journals still have" in capsys.readouterr().out
    assert len(entries(output)) == 6
    assert len(list((output / "journal").glob("run=*"))) == 1
    assert {str(each) for each in hourly(output)["hour"].dt.date} == {"2025-03-02"}


def test_an_empty_journal_gives_an_empty_report(events: Ledger, file: str, spark: SparkSession, tmp_path: Path) -> None:
    assert run(tmp_path / "out", file) == ExitCode.OK
    assert "The journals have no entries yet." in (tmp_path / "out" / "report.html").read_text()


def test_a_journal_that_is_named_twice_is_refused(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    connections = json.loads(Path(file).read_text())
    Path(file).write_text(json.dumps(connections | {"other": connections[NAME]}))

    assert run(tmp_path / "out", file, connections=(NAME, "other")) == ExitCode.USAGE
    assert "error: connection: 'ledger' and 'other' have the same journal" in capsys.readouterr().err
    assert not (tmp_path / "out" / "state.json").exists()


def test_connections_whose_messages_one_ledger_holds_are_reported_side_by_side(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path, sqlite_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = {"conn_type": "rabbitmq", "host": "nowhere", "extra": {"hold": "ledger", "ledger_url": sqlite_url}}
    Path(file).write_text(json.dumps(json.loads(Path(file).read_text()) | {"a": held, "b": held}))
    due = datetime.now(UTC) + timedelta(hours=1)
    ids = ["a0", "a1", "b0", "b1", "b2", "own"]
    EmbeddedBroker(events).schedule([Message(id=each, channel="orders", payload=b"x", deliver_at=due) for each in ids])
    with events.engine.execution_options(writes=True).begin() as connection:
        connection.execute(text("UPDATE delay_scheduled_message SET destination = substr(id, 1, 1) WHERE id <> 'own'"))

    assert run(tmp_path / "out", file, connections=("a", "b")) == ExitCode.OK

    scheduled = hourly(tmp_path / "out").groupby("connection")["scheduled"].sum()
    assert scheduled.to_dict() == {"a": 2, "b": 3}
    assert run(tmp_path / "all", file, connections=("a", NAME)) == ExitCode.USAGE
    assert "error: connection: 'a' and 'ledger' have the same journal" in capsys.readouterr().err


def test_a_connection_that_is_missing_fails_with_its_name(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "out", file, connections=("nowhere",)) == ExitCode.USAGE
    assert "has no connection 'nowhere'; export it, too" in capsys.readouterr().err


def test_a_missed_target_is_a_failure_that_no_retry_repairs(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(events, "late", "dispatched", DAY, late_ms=60_000)

    code = run(tmp_path / "out", file, "--fail-on-slo")

    said = capsys.readouterr().err
    assert code == ExitCode.SLO_MISSED
    assert said.startswith(
        "lateness: error: --fail-on-slo: ledger missed the target of 99.000% within 5 s; see file://"
    )
    found = classify(Evidence(exit_code=code, output=said.splitlines()))
    assert (found.verdict, found.rule) == (Verdict.PERMANENT, "delay-job")


def test_a_gap_is_refused_or_accepted_and_then_shown(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    now = datetime.now(UTC)
    record(events, "first", "dispatched", now - timedelta(days=40))
    run(output, file)
    state = state_of(output)
    position = json.loads(state["positions"][NAME])
    position["taken_at_ms"] -= 31 * 86_400_000
    (output / "state.json").write_text(json.dumps({**state, "positions": {NAME: json.dumps(position)}}))
    record(events, "second", "dispatched", now)

    assert run(output, file) == ExitCode.USAGE
    refused = capsys.readouterr().err
    assert refused.startswith("lateness: error: ledger: the position is of ")
    assert "; add --accept-gap to go on" in refused
    assert "onGap" not in refused

    assert run(output, file, "--accept-gap") == ExitCode.OK
    assert run(output, file) == ExitCode.OK  # the gap stays in the report

    since, until = (now - timedelta(days=31)).date(), now.date()
    for page in ("report.html", "report.md"):
        text = (output / page).read_text().replace("\\", "")
        assert f"Incomplete: entries of ledger between {since} and {until} may be missing" in text
    assert hourly(output)["dispatched"].sum() == 2


def test_only_connections_of_this_run_are_judged(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path, sqlite_url: str
) -> None:
    output = tmp_path / "out"
    record(events, "late", "dispatched", DAY, late_ms=60_000)
    assert run(output, file, "--fail-on-slo") == ExitCode.SLO_MISSED
    other = Ledger(f"sqlite:///{tmp_path}/other.db")
    other.migrate()
    record(other, "in time", "dispatched", DAY)
    connection = {"conn_type": "delay", "extra": {"ledger_url": f"sqlite:///{tmp_path}/other.db"}}
    Path(file).write_text(json.dumps(json.loads(Path(file).read_text()) | {"other": connection}))

    assert run(output, file, "--fail-on-slo", connections=("other",)) == ExitCode.OK
    other.close()
    assert set(hourly(output)["connection"]) == {NAME, "other"}
    assert run(output, file, "--fail-on-slo", connections=("other", NAME)) == ExitCode.SLO_MISSED


def test_full_does_not_drop_connections_that_are_not_named(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    fill_day(events, DAY, 2)
    run(output, file)
    state = state_of(output)
    before = json.dumps({**state, "positions": {**state["positions"], "gone": "{}"}})
    (output / "state.json").write_text(before)

    assert run(output, file, "--full") == ExitCode.USAGE
    assert "error: --full: the folder also has entries of 'gone', which would be lost; name" in capsys.readouterr().err
    assert (output / "state.json").read_text() == before


def test_a_day_in_the_future_does_not_empty_the_report(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path
) -> None:
    """One client's clock was wrong."""
    output = tmp_path / "out"
    record(events, "late", "dispatched", DAY, late_ms=60_000)
    record(events, "wrong clock", "dispatched", datetime(2099, 1, 1, tzinfo=UTC))

    assert run(output, file, "--fail-on-slo") == ExitCode.SLO_MISSED

    page = (output / "report.html").read_text()
    assert '<p class="soft">2025-03-01 (UTC), made ' in page
    assert "Left out: entries of 2099-01-01. These days are after today" in page


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("in_berlin")
def test_hours_are_in_utc_wherever_the_driver_runs(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path
) -> None:
    assert time.localtime(DAY.timestamp()).tm_hour == 1
    output = tmp_path / "out"
    for number in range(100):
        at = DAY + timedelta(hours=19 + number // 20, minutes=number % 20)
        record(events, str(number), "dispatched", at, late_ms=100_000 if number >= 80 else 0)
    assert run(output, file) == ExitCode.OK

    folder = ReportFolder(str(output))
    report = gather(spark, folder, folder.read_state(), ReportOptions())

    hours = [DAY.replace(hour=hour, tzinfo=None) for hour in range(19, 24)]
    assert hourly(output)["hour"].tolist() == hours
    assert [row["hour"] for row in report.hours] == [row["hour"] for row in report.traffic] == hours
    assert [row["hour"] for row in report.anomalies] == hours[-1:]
    assert (report.first, report.last) == (date(2025, 3, 1), date(2025, 3, 1))
    assert "2025-03-01 23:00" in (output / "report.html").read_text()


# -- figures depend on the journal alone -----------------------------------------------------------------------------


def test_one_run_over_three_days_has_the_figures_of_three_daily_runs(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path
) -> None:
    daily = tmp_path / "daily"
    for number in range(3):
        day = DAY + timedelta(days=number)
        fill_day(events, day + timedelta(hours=1), 4)
        # Again on each day, on the first and third one, and twice on one day after a requeue on the day before.
        record(events, "always", "dispatched", day + timedelta(hours=2))
        if number != 1:
            record(events, "seldom", "dispatched", day + timedelta(hours=3))
        record(events, "requeued", ("dispatched", "requeued", "dispatched")[number], day + timedelta(hours=4))
        record(events, "requeued", "dispatched", day + timedelta(hours=5))
        assert run(daily, file) == ExitCode.OK

    assert run(tmp_path / "once", file) == ExitCode.OK

    found = hourly(daily)
    pd.testing.assert_frame_equal(hourly(tmp_path / "once"), found, check_like=True)
    duplicates = found[found["duplicates"] > 0]
    assert [(f"{row.hour:%d %H}", row.duplicates) for row in duplicates.itertuples()] == [
        ("01 05", 1),
        ("02 02", 1),
        ("02 05", 1),
        ("03 02", 1),
        ("03 05", 1),
    ]


def test_a_late_entry_changes_the_duplicates_of_the_next_day(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    record(events, "twice", "dispatched", DAY + timedelta(days=1, hours=2))
    run(output, file)
    assert hourly(output)["duplicates"].tolist() == [0]
    record(events, "twice", "dispatched", DAY + timedelta(hours=2))

    run(output, file)

    assert hourly(output)["duplicates"].tolist() == [0, 1]


def test_a_crash_with_another_limit_leaves_the_figures_of_the_old_one(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    record(events, "slow", "dispatched", DAY, late_ms=3000)
    run(output, file)
    with monkeypatch.context() as broken:
        broken.setattr(ReportFolder, "commit", stop)
        assert run(output, file, "--slo-seconds", "2") == ExitCode.INTERRUPTED

    assert run(output, file) == ExitCode.OK

    assert hourly(output)["late"].tolist() == [0]
    assert "100 % in time" in (output / "report.html").read_text()


# -- the folder ------------------------------------------------------------------------------------------------------


def test_a_folder_without_its_state_is_refused_and_keeps_its_entries(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    fill_day(events, DAY, 2)
    run(output, file)
    written = sorted((output / "journal").rglob("*.parquet"))
    (output / "state.json").unlink()

    assert run(output, file) == ExitCode.USAGE

    assert "has entries of runs, but state.json, which names them, is missing; restore it" in capsys.readouterr().err
    assert sorted((output / "journal").rglob("*.parquet")) == written


def test_a_first_run_that_crashes_can_be_repeated(
    events: Ledger, file: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    fill_day(events, DAY, 2)
    with monkeypatch.context() as broken:
        broken.setattr(ReportFolder, "commit", stop)
        assert run(output, file) == ExitCode.INTERRUPTED

    assert run(output, file) == ExitCode.OK

    assert hourly(output)["dispatched"].sum() == 2
    assert len(list((output / "journal").glob("run=*"))) == len(list((output / "hourly").glob("run=*"))) == 1


@pytest.mark.parametrize("second_commits", [False, True])
def test_of_two_runs_at_the_same_time_one_counts_and_the_folder_stays_whole(
    second_commits: bool,
    events: Ledger,
    file: str,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A task is retried while the driver of its first try still lives."""
    output = tmp_path / "out"
    fill_day(events, DAY, 2)
    run(output, file)
    record(events, "new", "dispatched", DAY + timedelta(hours=1))
    commit = ReportFolder.commit

    def commit_beside_another_run(folder: ReportFolder, *args: Any, **kwargs: Any) -> None:
        record(events, "newer", "dispatched", DAY + timedelta(hours=1))
        monkeypatch.setattr(ReportFolder, "commit", commit if second_commits else stop)
        assert run(output, file) == (ExitCode.OK if second_commits else ExitCode.INTERRUPTED)
        monkeypatch.setattr(ReportFolder, "commit", commit)
        commit(folder, *args, **kwargs)

    monkeypatch.setattr(ReportFolder, "commit", commit_beside_another_run)

    assert run(output, file) == (ExitCode.FAILED if second_commits else ExitCode.OK)

    assert ("another run has written to" in capsys.readouterr().err) == second_commits
    assert len(entries(output)) == (6 if second_commits else 5)
    assert hourly(output)["dispatched"].sum() == (4 if second_commits else 3)
    assert run(output, file) == ExitCode.OK
    assert len(entries(output)) == len(entries(output)["position"].unique()) == 6
    assert hourly(output)["dispatched"].sum() == 4
    named = {f"run={each['id']}" for each in state_of(output)["runs"]}
    assert {path.name for path in (output / "journal").iterdir()} == named


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
    state = FolderState(slo_seconds=5.0).to_text()

    def commit_late(folder: ReportFolder, *args: Any, **kwargs: Any) -> None:
        folder.write("state.json", state.encode())
        commit(folder, *args, **kwargs)

    monkeypatch.setattr(ReportFolder, "commit", commit_late)

    assert run(output, file) == ExitCode.FAILED
    assert "another run has written to" in capsys.readouterr().err
    assert (output / "state.json").read_text() == state
