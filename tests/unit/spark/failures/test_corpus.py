"""What the classifier makes of jobs that really failed; their makers are in tests/spark_corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from airflow_delay_provider.spark.failures import Evidence, Verdict, classify
from tests.spark_corpus.cases import CASES
from tests.spark_corpus.recorded import Recorded, recorded
from tests.spark_corpus.report import PAGE, page_with_report

CORPUS = recorded()


@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry.name)
def test_a_recorded_failure_gets_the_right_verdict(entry: Recorded) -> None:
    classification = entry.classification()

    assert classification.verdict is entry.expected, f"{classification}\nbut: {entry.why}"


@pytest.mark.parametrize("prefix", ["", "[2026-01-01 00:00:00,000] {spark_submit.py:536} INFO - "])
def test_a_log_that_airflow_has_stripped_is_called_the_same(prefix: str) -> None:
    def stripped(lines: Sequence[str]) -> list[str]:
        return [prefix + line.strip() for line in lines]

    for entry in CORPUS:
        evidence = replace(
            entry.evidence,
            output=stripped(entry.evidence.output),
            driver_output=stripped(entry.evidence.driver_output),
        )
        assert classify(evidence).verdict is entry.classification().verdict, entry.name


def test_the_last_twenty_lines_alone_never_turn_a_permanent_failure_into_a_passing_one() -> None:
    for entry in CORPUS:
        tail = "\n".join(line.strip() for line in entry.evidence.output[-20:])
        called = classify(Evidence(exception=f"Cannot execute: job. Error code is: 1.\n{tail}")).verdict
        assert entry.expected is not Verdict.PERMANENT or called in {Verdict.PERMANENT, Verdict.UNKNOWN}, entry.name


def test_no_permanent_failure_is_tried_again_as_transient_or_infrastructure() -> None:
    lenient = {Verdict.TRANSIENT, Verdict.INFRASTRUCTURE}
    permanent = [entry for entry in CORPUS if entry.expected is Verdict.PERMANENT]

    assert len(permanent) >= 15
    assert [entry.name for entry in permanent if entry.classification().verdict in lenient] == []


def test_the_corpus_has_forty_failures_over_client_and_cluster_mode() -> None:
    assert len(CORPUS) >= 40
    assert {entry.mode for entry in CORPUS} == {"local", "client", "cluster"}


def test_every_recorded_failure_has_its_maker() -> None:
    makers = {case.name: case for case in CASES}

    assert {entry.name for entry in CORPUS} <= set(makers)
    assert all(makers[entry.name].expected is entry.expected for entry in CORPUS)


def test_the_table_of_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_with_report()
