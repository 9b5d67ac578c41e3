from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.spark.failures import Classification, Verdict
from airflow_delay_provider.spark.retries import MAX_REASON_LENGTH, Attempt, History, Phase

NOW = datetime(2030, 1, 1, 12, 30, 15, 123456, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
REFUSED = Classification(verdict=Verdict.TRANSIENT, rule="connection-refused", line="", reason="a source refused")


def test_a_task_that_has_not_begun_starts_with_attempt_one():
    begun = History(began_at=NOW).begin_attempt(NOW)
    assert begun.phase is Phase.SUBMITTED
    assert begun.attempts == (Attempt(number=1, started_at=NOW),)


def test_the_way_of_a_task_that_fails_once_and_succeeds():
    history = History(began_at=NOW).begin_attempt(NOW)
    history = history.fail_attempt(REFUSED, NOW + MINUTE, exit_code=1)
    first = Attempt(
        number=1,
        started_at=NOW,
        ended_at=NOW + MINUTE,
        verdict=Verdict.TRANSIENT,
        rule="connection-refused",
        reason="a source refused",
        exit_code=1,
    )
    assert history == History(began_at=NOW, phase=Phase.ENDED, attempts=(first,))

    history = history.wait_until(NOW + 2 * MINUTE)
    assert (history.phase, history.next_at) == (Phase.WAITING, NOW + 2 * MINUTE)

    history = history.begin_attempt(NOW + 2 * MINUTE)
    assert (history.phase, history.next_at, history.last.number) == (Phase.SUBMITTED, None, 2)

    history = history.end(NOW + 3 * MINUTE)
    second = Attempt(number=2, started_at=NOW + 2 * MINUTE, ended_at=NOW + 3 * MINUTE)
    assert history == History(began_at=NOW, phase=Phase.ENDED, attempts=(first, second))


def test_the_end_of_a_task_does_not_move_the_end_of_its_attempts():
    failed = History(began_at=NOW).begin_attempt(NOW).fail_attempt(REFUSED, NOW + MINUTE)
    assert failed.end(NOW + 5 * MINUTE).last.ended_at == NOW + MINUTE


def test_a_long_reason_is_cut():
    classification = Classification(verdict=Verdict.TRANSIENT, rule="", line="", reason="x" * 1000)
    failed = History(began_at=NOW).begin_attempt(NOW).fail_attempt(classification, NOW)
    assert failed.last.reason == "x" * MAX_REASON_LENGTH


def test_the_longest_history_fits_into_the_task_state_store():
    """Airflow warns above 64 KiB; 150 attempts is what the limits of the budgets allow."""
    classification = Classification(verdict=Verdict.INFRASTRUCTURE, rule="r" * 40, line="", reason="x" * 1000)
    history = History(began_at=NOW)
    for _ in range(150):
        history = history.begin_attempt(NOW).fail_attempt(classification, NOW, exit_code=137)
    assert len(json.dumps(history.wait_until(NOW).as_json())) < 65_535


MOMENTS = st.datetimes(min_value=datetime(2000, 1, 1), max_value=datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - hypothesis adds the zone
ATTEMPTS = st.builds(
    Attempt,
    number=st.integers(1, 150),
    started_at=MOMENTS,
    ended_at=st.none() | MOMENTS,
    verdict=st.none() | st.sampled_from(Verdict),
    rule=st.text(max_size=20),
    reason=st.text(max_size=20),
    exit_code=st.none() | st.integers(-64, 255),
)
HISTORIES = st.builds(
    History,
    began_at=MOMENTS,
    phase=st.sampled_from(Phase),
    attempts=st.lists(ATTEMPTS, max_size=5).map(tuple),
    next_at=st.none() | MOMENTS,
)


@given(history=HISTORIES)
def test_a_history_survives_being_stored(history: History):
    assert History.from_json(json.loads(json.dumps(history.as_json()))) == history


@given(history=HISTORIES)
def test_only_plain_json_is_stored(history: History):
    assert all(type(each) in (str, int, type(None)) for each in leaves(history.as_json()))


def leaves(data: Any) -> list[Any]:
    if type(data) is dict:
        return [leaf for value in data.values() for leaf in leaves(value)]
    if type(data) is list:
        return [leaf for value in data for leaf in leaves(value)]
    return [data]
