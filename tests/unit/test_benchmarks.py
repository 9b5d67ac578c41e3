from __future__ import annotations

import os
from pathlib import Path

import pytest

from airflow_delay_provider.dispatcher.dispatch_due import DispatchDue
from benchmarks import ledger as ledger_benchmark
from benchmarks.databases import URL_VARIABLE
from benchmarks.ledger import Sizes
from benchmarks.measuring import Results, percentile
from benchmarks.report import fill, ledger_tables
from benchmarks.results import read_csv, read_machine

TINY = Sizes(
    schedule_messages=20,
    schedule_singles=2,
    dispatch_messages=20,
    channel_messages=20,
    requeued=2,
    repeats=1,
    lateness_seconds=0.1,
    lateness_repeats=1,
    lookup_sizes=(2_000, 4_000),
    lookup_calls=1,
)
DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.lateness.DELAY_SECONDS", (0.1, 0.3))


def test_a_tiny_run_measures_everything_and_finds_all_counts_right(tmp_path: Path) -> None:
    assert ledger_benchmark.main(["--results", str(tmp_path)], sizes=TINY) == 0

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ledger.csv",
        "ledger_flat.png",
        "ledger_lateness.png",
        "ledger_machine.json",
        "ledger_rates.png",
    ]
    measurements = read_csv(tmp_path / "ledger.csv")
    names: dict[str, set[str]] = {}
    for measurement in measurements:
        names.setdefault(measurement.database, set()).add(measurement.name)
    assert list(names) == (["sqlite", "postgresql"] if URL_VARIABLE in os.environ else ["sqlite"])
    assert all(names["sqlite"] == others for others in names.values())
    assert all(0 < m.min <= m.value <= m.max for m in measurements if m.unit != "ms")
    tables = ledger_tables(measurements, read_machine(tmp_path / "ledger_machine.json"))
    assert "| sqlite | dispatch, 2 processes |" in fill(DOCUMENT.read_text(), tables)


def test_a_run_that_leaves_messages_undispatched_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    monkeypatch.setattr(DispatchDue, "run_once", lambda _: 1.0)

    assert ledger_benchmark.main(["--results", str(tmp_path)], sizes=TINY) == 1

    assert "error: messages that wait: found 20, wanted 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_ratio_is_the_median_of_repeats_that_ran_side_by_side() -> None:
    results = Results()
    results.add("sqlite", "ours", [10, 30, 50], "messages/s", ratio_to="bare", base=[20, 30, 200])

    measurement = results.measurements[0]
    assert (measurement.value, measurement.min, measurement.max) == (30, 10, 50)
    assert measurement.ratio == 0.5


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100)])
def test_a_percentile_is_a_value_that_was_measured(share: float, expected: int) -> None:
    assert percentile(list(range(1, 101)), share) == expected


def test_a_document_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no place <!-- rates: begin -->"):
        fill("# Performance", {"rates": "| a |"})
