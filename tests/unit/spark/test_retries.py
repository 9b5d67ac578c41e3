from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.failures import Classification, Verdict
from airflow_delay_provider.spark.retries import Decision, History, SparkRetries, decide

BEGAN = datetime(2030, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
T, I, R, P, U = (  # noqa: E741 - one letter each, so that a sequence reads as a line
    Verdict.TRANSIENT,
    Verdict.INFRASTRUCTURE,
    Verdict.RESOURCE,
    Verdict.PERMANENT,
    Verdict.UNKNOWN,
)


def history_of(*verdicts: Verdict) -> History:
    """A task whose attempts failed like this, all in no time."""
    history = History(began_at=BEGAN)
    for verdict in verdicts:
        classification = Classification(verdict=verdict, rule="", line="", reason="because")
        history = history.begin_attempt(BEGAN).fail_attempt(classification, BEGAN)
    return history


def decide_after(*verdicts: Verdict, after: timedelta = timedelta(0), drawn: float = 0.0, **settings: Any) -> Decision:
    return decide(history_of(*verdicts), SparkRetries(**settings), now=BEGAN + after, random=lambda: drawn)


def submissions(verdicts: Iterable[Verdict], retries: SparkRetries) -> int:
    """How often a job is submitted that would fail like this for ever."""
    failed: list[Verdict] = []
    for verdict in verdicts:
        failed.append(verdict)
        if decide(history_of(*failed), retries, now=BEGAN, random=lambda: 0.0).delay is None:
            break
    return len(failed)


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_a_job_whose_failures_may_pass_is_submitted_as_often_as_attempts_are_allowed(attempts: int):
    assert submissions([T] * 60, SparkRetries(max_attempts=attempts)) == attempts


def test_one_attempt_means_no_retry():
    assert decide_after(T, max_attempts=1) == Decision(delay=None, reason="all 0 retries (1 attempts) are used up")


@pytest.mark.parametrize("failures", [0, 1, 3])
def test_failures_of_the_cluster_have_a_budget_of_their_own(failures: int):
    assert submissions([I] * 60, SparkRetries(max_infrastructure_failures=failures)) == failures + 1
    spent = decide_after(*[I] * (failures + 1), max_infrastructure_failures=failures)
    assert spent == Decision(delay=None, reason=f"all {failures} failures of the cluster are used up")


@pytest.mark.parametrize("failures", [0, 1, 3])
def test_failures_for_want_of_resources_have_a_budget_within_the_attempts(failures: int):
    assert submissions([R] * 60, SparkRetries(max_resource_failures=failures)) == failures + 1
    spent = decide_after(*[R] * (failures + 1), max_resource_failures=failures)
    assert spent == Decision(delay=None, reason=f"all {failures} failures for lack of resources are used up")


def test_failures_for_want_of_resources_use_up_attempts_too():
    assert decide_after(T, T, R, max_attempts=4).delay is not None
    assert decide_after(T, T, T, R, max_attempts=4).reason == "all 3 retries (4 attempts) are used up"


def test_failures_of_the_cluster_do_not_eat_the_attempts_of_the_application():
    assert submissions([I] * 10 + [T] * 60, SparkRetries(max_attempts=3)) == 10 + 3
    assert decide_after(*[I] * 10, T, T, max_attempts=3).delay is not None


def test_failures_of_the_application_do_not_eat_the_budget_of_the_cluster():
    assert decide_after(T, T, I, max_attempts=3, max_infrastructure_failures=1).delay is not None
    assert decide_after(T, T, I, I, max_attempts=3, max_infrastructure_failures=1).delay is None


def test_a_permanent_failure_is_not_retried_even_with_budget_left():
    assert decide_after(P) == Decision(delay=None, reason="it would fail again")


@pytest.mark.parametrize("taken_for", [T, I, R, P])
def test_unknown_failures_count_as_the_policy_says(taken_for: Verdict):
    settings = {"max_attempts": 4, "max_resource_failures": 1, "max_infrastructure_failures": 2}
    unknown = submissions([U] * 60, SparkRetries(unknown_as=taken_for, **settings))
    assert unknown == submissions([taken_for] * 60, SparkRetries(**settings))


def test_a_verdict_may_be_given_as_text():
    assert SparkRetries(unknown_as="permanent").unknown_as is P  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("after", "tried_again"), [(30 * SECOND, True), (45 * SECOND, True), (46 * SECOND, False), (99 * SECOND, False)]
)
def test_no_submission_begins_later_than_max_elapsed_after_the_first(after: timedelta, tried_again: bool):
    decision = decide_after(T, after=after, max_elapsed=timedelta(minutes=1))
    assert (decision.delay is not None) is tried_again
    assert tried_again or "max_elapsed 0:01:00" in decision.reason


def test_delays_grow_with_failures_of_the_same_kind_up_to_the_cap():
    longest = [decide_after(*[T] * n, drawn=1.0, max_attempts=50).delay for n in range(1, 9)]
    assert longest == [seconds * SECOND for seconds in (30, 60, 120, 240, 480, 900, 900, 900)]
    shortest = [decide_after(*[T] * n, drawn=0.0, max_attempts=50).delay for n in range(1, 9)]
    assert shortest == [15 * SECOND] * 8


def test_delays_of_one_kind_do_not_grow_with_failures_of_another():
    assert decide_after(I, I, I, I, T, drawn=1.0).delay == 30 * SECOND
    assert decide_after(T, T, T, I, drawn=1.0).delay == 30 * SECOND
    assert decide_after(T, R, drawn=1.0).delay == 30 * SECOND
    assert decide_after(T, U, drawn=1.0).delay == 60 * SECOND


def test_the_backoff_can_be_chosen():
    backoff = Backoff(initial=SECOND, cap=4 * SECOND, floor=SECOND, factor=3)
    assert [decide_after(*[T] * n, drawn=1.0, backoff=backoff).delay for n in (1, 2, 3)] == [
        SECOND,
        3 * SECOND,
        4 * SECOND,
    ]


BUDGETS = st.builds(
    SparkRetries,
    max_attempts=st.integers(1, 6),
    max_resource_failures=st.integers(0, 6),
    max_infrastructure_failures=st.integers(0, 6),
    unknown_as=st.sampled_from([T, I, R, P]),
)


@given(retries=BUDGETS, verdicts=st.lists(st.sampled_from(Verdict), min_size=20, max_size=20))
def test_no_sequence_of_failures_leads_to_more_submissions_than_the_budgets_say(
    retries: SparkRetries, verdicts: list[Verdict]
):
    made = submissions(verdicts, retries)
    counted = [retries.unknown_as if each is U else each for each in verdicts[:made]]
    assert made <= retries.max_attempts + retries.max_infrastructure_failures
    assert sum(each is not I for each in counted) <= retries.max_attempts
    assert counted.count(I) <= retries.max_infrastructure_failures + 1
    assert counted.count(R) <= retries.max_resource_failures + 1
    assert P not in counted[:-1]


@given(retries=BUDGETS, verdicts=st.lists(st.sampled_from([T, I, R, U]), min_size=1, max_size=20))
def test_a_budget_that_is_not_used_up_is_never_refused(retries: SparkRetries, verdicts: list[Verdict]):
    made = submissions(verdicts, retries)
    counted = [retries.unknown_as if each is U else each for each in verdicts[:made]]
    stopped = decide(history_of(*verdicts[:made]), retries, now=BEGAN, random=lambda: 0.0).delay is None
    used_up = (
        counted[-1] is P
        or counted.count(I) > retries.max_infrastructure_failures
        or counted.count(R) > retries.max_resource_failures
        or sum(each is not I for each in counted) >= retries.max_attempts
    )
    assert stopped is used_up


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_attempts": 0}, "max_attempts: 0 .* use 1 to 50"),
        ({"max_attempts": 51}, "max_attempts"),
        ({"max_attempts": True}, "max_attempts: True"),
        ({"max_attempts": 2.0}, "max_attempts: 2.0"),
        ({"max_resource_failures": -1}, "max_resource_failures: -1 .* use 0 to 50"),
        ({"max_infrastructure_failures": 101}, "max_infrastructure_failures: 101 .* use 0 to 100"),
        ({"max_elapsed": timedelta(0)}, "max_elapsed"),
        ({"unknown_as": U}, "unknown_as"),
        ({"unknown_as": "hopeless"}, "unknown_as: 'hopeless'"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings: dict[str, Any], said: str):
    with pytest.raises(ConfigurationError, match=said):
        SparkRetries(**settings)
