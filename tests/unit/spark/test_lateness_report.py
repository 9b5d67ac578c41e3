from __future__ import annotations

import re
import runpy
import threading
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.jobs import lateness
from airflow_delay_provider.spark.jobs.command import ExitCode
from airflow_delay_provider.spark.jobs.lateness_folder import (
    ChangedStateError,
    FolderState,
    Gap,
    ReportFolder,
    Run,
)
from airflow_delay_provider.spark.jobs.lateness_page import render_html, render_markdown
from airflow_delay_provider.spark.jobs.lateness_plots import draw_plots
from airflow_delay_provider.spark.jobs.lateness_report import CURVE, Report, ReportOptions, Summary

HOUR = datetime(2026, 3, 1, 9)  # noqa: DTZ001 - as Spark returns it, in UTC
DAG_FILE = Path(__file__).parents[3] / "dags" / "lateness_report.py"
HOSTILE = "<b>$x$ | `a`\n</td>"


def summary(channel: str = "", connection: str = HOSTILE, **counts: int) -> Summary:
    names = ("scheduled", "dispatched", "cancelled", "dead_lettered", "requeued", "parked", "late", "early")
    full = dict.fromkeys([*names, "to_second", "when_read", "untimed", "duplicates"], 0) | counts
    lateness_ms = {"p50_ms": 10.0, "p95_ms": 400.0, "p99_ms": 61_000.0, "max_ms": 7_300_000.0}
    return Summary(connection=connection, channel=channel, counts=full, lateness=lateness_ms)


def report(**values: Any) -> Report:
    row = {"hour": HOUR, "connection": HOSTILE, "channel": HOSTILE, "p50_ms": 5.0, "p99_ms": 900.0, "dispatched": 3}
    given = {
        "connections": [summary(dispatched=200, late=5)],
        "channels": [summary(HOSTILE, dispatched=200, late=5)],
        "hours": [row, row | {"hour": HOUR + timedelta(hours=3)}],
        "traffic": [{"hour": HOUR, "connection": HOSTILE, "scheduled": 4, "dispatched": 3, "late": 1}],
        "curves": {HOSTILE: [float(number) for number in range(len(CURVE))]},
        "anomalies": [row | {"usual_ms": 20.0}],
        "reasons": [{"connection": HOSTILE, "channel": HOSTILE, "change": "parked", "n": 1, "reason": HOSTILE}],
    } | values
    day = date(2026, 3, 1)
    return Report(options=ReportOptions(), first=day, last=day, made_at=datetime(2026, 3, 2, tzinfo=UTC), **given)


def test_names_and_reasons_of_users_are_text_on_the_page_and_in_the_plots():
    made = report()
    plots = draw_plots(made)
    page, markdown = render_html(made, plots), render_markdown(made, list(plots))

    assert "<b>$x$" not in page
    assert "&lt;b&gt;$x$ | `a`" in page
    assert "<b>" not in markdown.replace(r"\<b\>", "")
    assert r"\<b\>$x$ \| \`a\` \</td\>" in markdown
    assert sorted(plots) == ["distribution", "hours", "traffic"]
    assert all(picture.startswith(b"<?xml") and b"<b>" not in picture for picture in plots.values())


def test_the_same_figures_make_the_same_plots():
    assert draw_plots(report()) == draw_plots(report())


def test_the_error_budget_is_the_share_of_allowed_lateness_that_is_used():
    each = summary(dispatched=200, late=5)

    assert each.in_time == pytest.approx(0.975)
    assert each.burn(0.99) == pytest.approx(2.5)
    assert "<td>250%</td>" in render_html(report(), {})
    assert "97.500 %" in render_html(report(), {})


def test_a_share_below_one_is_never_shown_as_all():
    page = render_html(report(connections=[summary(dispatched=10_000_000, late=1)], channels=[]), {})

    assert "99.999 %" in page
    assert "100 %</b>" not in page


def test_what_a_journal_cannot_show_is_not_shown_as_zero():
    second = render_html(report(connections=[summary(dispatched=5, to_second=5)], channels=[]), {})
    untimed = render_html(report(connections=[summary(dispatched=5, untimed=5)], channels=[]), {})
    exact = render_html(report(connections=[summary(dispatched=5)], channels=[]), {})

    assert "<td>unknown</td>" in second
    assert "<td>≤ 10 ms</td>" in second
    assert "RabbitMQ records only the second" in second
    assert "lateness unknown" in untimed
    assert "--copied" in untimed
    assert "unknown" not in exact
    assert "≤" not in exact


def test_connections_that_missed_the_target_are_found_among_those_that_are_judged():
    kept, unknown = summary(connection="kept", dispatched=100, late=1), summary(connection="unknown")
    missed = summary(connection="missed", dispatched=100, late=2)
    made = report(connections=[kept, missed, unknown])

    assert made.missed(["kept", "missed", "unknown"]) == [missed]
    assert made.missed(["kept", "unknown"]) == []


def test_gaps_and_days_after_today_are_said_even_without_figures():
    gap = Gap(connection=HOSTILE, since="2026-01-01", until="2026-02-02", reason="3 records are deleted")
    made = report(gaps=[gap], later_days=["2099-01-01"])
    for each in (made, replace(made, first=None, last=None)):
        page = render_html(each, {})
        assert "Incomplete: entries of &lt;b&gt;$x$" in page
        assert "between 2026-01-01 and 2026-02-02 may be missing: 3 records are deleted." in page
        assert "Left out: entries of 2099-01-01." in page


# -- the folder ------------------------------------------------------------------------------------------------------


def test_a_state_survives_as_text(tmp_path: Path):
    folder = ReportFolder(str(tmp_path))
    run = Run(id="a", entries=3, days=("2026-03-01", "2026-03-02"))
    gap = Gap(connection="c", since="2026-02-01", until="2026-02-03", reason="2 records are deleted")
    figures = {"2026-03-01": "a", "2026-03-02": "a"}
    state = FolderState(runs=(run,), positions={"c": "p"}, figures=figures, gaps=(gap,), slo_seconds=5.0)

    assert folder.read_state() == FolderState()
    folder.commit(state, before=FolderState())

    assert folder.read_state() == state
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json", "state.json.lock"]
    assert folder.entries_of(state, ["2026-03-02"]) == [f"{tmp_path.as_uri()}/journal/run=a/day=2026-03-02"]


def test_a_state_that_changed_meanwhile_is_not_replaced(tmp_path: Path):
    folder = ReportFolder(str(tmp_path))
    folder.commit(FolderState(slo_seconds=1.0), before=FolderState())

    with pytest.raises(ChangedStateError, match="another run has written"):
        folder.commit(FolderState(slo_seconds=2.0), before=FolderState())

    assert folder.read_state().slo_seconds == 1.0


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 2, "runs": [{}]}'])
def test_a_state_of_another_program_is_refused(tmp_path: Path, text: str):
    (tmp_path / "state.json").write_text(text)

    with pytest.raises(ConfigurationError, match="was not written by this version of the job"):
        ReportFolder(str(tmp_path)).read_state()


def test_of_many_commits_at_once_one_counts(tmp_path: Path):
    folder = ReportFolder(str(tmp_path))
    folder.begin()
    ready, refused = threading.Barrier(8), []

    def commit(number: int) -> None:
        ready.wait(10)
        try:
            folder.commit(FolderState(slo_seconds=float(number)), before=FolderState())
        except ChangedStateError:
            refused.append(number)

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    assert len(refused) == 7
    assert {*refused, folder.read_state().slo_seconds} == set(range(1, 9))


def test_beginning_again_keeps_the_state(tmp_path: Path):
    folder = ReportFolder(str(tmp_path))
    folder.commit(FolderState(slo_seconds=1.0), before=FolderState())

    folder.begin()

    assert folder.read_state().slo_seconds == 1.0


def test_what_runs_have_written_and_the_state_does_not_name_is_removed(tmp_path: Path):
    written = ["journal/run=a", "journal/run=b", "journal/run=c", "journal/other"]
    written += [f"hourly/run={run}/day=2026-03-0{day}" for run, day in (("a", 1), ("a", 2), ("b", 1), ("c", 1))]
    for name in written:
        (tmp_path / name).mkdir(parents=True)
    folder = ReportFolder(str(tmp_path))
    runs = (Run(id="a", entries=1, days=("2026-03-01",)), Run(id="d", entries=1, days=("2026-03-02",)))
    state = FolderState(runs=runs, figures={"2026-03-01": "a", "2026-03-02": "d"})

    folder.remove_unnamed(state, ["a", "b"])

    kept = ["journal/run=a", "journal/run=c", "journal/other", "hourly/run=a/day=2026-03-01"]
    kept += ["hourly/run=c/day=2026-03-01"]
    assert [name for name in written if (tmp_path / name).exists()] == [name for name in written if name in kept]
    assert not (tmp_path / "hourly" / "run=b").exists()
    assert folder.find_runs() == {"a", "c"}


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "required: --output"),
        (["--output", "o", "--slo-target", "1"], "--slo-target: must be between 0 and 1"),
        (["--output", "o", "--slo-target", "99"], "--slo-target: must be between 0 and 1"),
        (["--output", "o", "--slo-seconds", "0"], "--slo-seconds: must be more than 0"),
        (["--output", "o", "--slo-seconds", "nan"], "--slo-seconds: must be more than 0"),
        (["--output", "o", "--days", "-1"], "--days: must be more than 0"),
        (["--output", "o", "--copied", "r"], "--copied: 'r' is not among the connections; add --connection r"),
        (["--output", "o", "--conection", "r"], "unrecognized arguments: --conection"),
    ],
)
def test_wrong_usage_is_named_before_spark_starts(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        lateness.main(arguments)

    assert ended.value.code == ExitCode.USAGE
    assert problem in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        lateness.main(["--help"])

    assert ended.value.code == ExitCode.OK
    said = " ".join(capsys.readouterr().out.split())
    assert "--fail-on-slo" in said
    assert "Entries that they no longer have are lost." in said


def test_the_nightly_report_goes_on_after_a_gap():
    dag = runpy.run_path(str(DAG_FILE))["dag"]
    [task] = dag.tasks
    words = [
        re.sub(r"{{ params\.(\w+) }}", lambda name: str(dag.params[name[1]]), word) for word in task.application_args
    ]

    assert lateness._parse(words).accept_gap
