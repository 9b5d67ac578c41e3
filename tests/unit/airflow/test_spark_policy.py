"""Which failures of a plain SparkSubmitOperator are tried again, when, and with which reason."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG
from airflow.sdk.definitions.retry_policy import RetryAction, RetryDecision
from airflow.sdk.exceptions import AirflowException
from airflow.serialization.serialized_objects import DagSerialization

from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.exceptions import ConfigurationError, InvalidMessageError
from airflow_delay_provider.spark.failures import Evidence
from airflow_delay_provider.spark.policy import SparkRetryPolicy

REFUSED = "ConnectionRefusedError: [Errno 111] Connection refused"
SYNTAX = "SyntaxError: invalid syntax"
OURS = {
    "name": "our quota",
    "verdict": "permanent",
    "reason": "the quota is used up",
    "text": "OUR-QUOTA",
    "where": "anywhere",
}


def failed(*output: str, code: int = 1) -> AirflowException:
    """What the provider raises for a spark-submit that printed ``output`` last."""
    tail = "".join(f"\n{line}" for line in output)
    return AirflowException(
        f"Cannot execute: spark-submit --master local SyntaxError.py. Error code is: {code}."
        f"\nLast spark-submit output:{tail}"
    )


def decide(policy: SparkRetryPolicy, error: BaseException, try_number: int = 1) -> RetryDecision:
    return policy.evaluate(exception=error, try_number=try_number, max_tries=5, context=None)


def traceback(last_line: str) -> list[str]:
    return ["Traceback (most recent call last):", '  File "/jobs/job.py", line 7, in <module>', "    run()", last_line]


def test_permanent_failures_fail_at_once_with_the_reason() -> None:
    decision = decide(SparkRetryPolicy(), failed(*traceback(SYNTAX)))
    assert decision.action is RetryAction.FAIL
    assert decision.reason is not None
    assert decision.reason.startswith("permanent: ")
    assert SYNTAX in decision.reason


def test_transient_failures_are_retried_after_a_growing_delay() -> None:
    policy = SparkRetryPolicy(random=lambda: 0.5)
    decisions = [decide(policy, failed(*traceback(REFUSED)), number) for number in (1, 2, 3, 4, 5, 6, 99)]
    assert {each.action for each in decisions} == {RetryAction.RETRY}
    assert [each.retry_delay for each in decisions] == [
        timedelta(seconds=seconds) for seconds in (20, 35, 65, 125, 245, 305, 305)
    ]
    assert decisions[0].reason is not None
    assert decisions[0].reason.startswith("transient: ")
    assert REFUSED in decisions[0].reason


@pytest.mark.parametrize(("drawn", "seconds"), [(0.0, 10.0), (0.25, 15.0)])
def test_the_delay_is_drawn_between_the_floor_and_the_ceiling(drawn: float, seconds: float) -> None:
    policy = SparkRetryPolicy(random=lambda: drawn)
    assert decide(policy, failed(*traceback(REFUSED))).retry_delay == timedelta(seconds=seconds)


def test_the_backoff_can_be_chosen() -> None:
    backoff = Backoff(initial=timedelta(seconds=4), factor=3, cap=timedelta(seconds=20), floor=timedelta(0))
    policy = SparkRetryPolicy(backoff=backoff, random=lambda: 0.5)
    delays = [decide(policy, failed(*traceback(REFUSED)), number).retry_delay for number in (1, 2, 3)]
    assert delays == [timedelta(seconds=2), timedelta(seconds=6), timedelta(seconds=10)]


@pytest.mark.parametrize(("on_unknown", "action"), [("retry", RetryAction.RETRY), ("fail", RetryAction.FAIL)])
def test_unknown_failures_follow_on_unknown(on_unknown: str, action: RetryAction) -> None:
    decision = decide(SparkRetryPolicy(on_unknown=on_unknown), failed("all was well"))
    assert decision.action is action
    assert decision.reason is not None
    assert decision.reason.startswith("unknown: ")


def test_unknown_failures_are_retried_by_default() -> None:
    assert decide(SparkRetryPolicy(), RuntimeError("what is this")).action is RetryAction.RETRY


def test_a_kill_from_outside_is_known_by_the_exit_code_alone() -> None:
    decision = decide(SparkRetryPolicy(on_unknown="fail"), failed(code=137))
    assert decision.action is RetryAction.RETRY


def test_rules_of_ones_own_go_first() -> None:
    error = failed(*traceback(f"{REFUSED} OUR-QUOTA"))
    assert decide(SparkRetryPolicy(), error).action is RetryAction.RETRY
    decision = decide(SparkRetryPolicy(rules=[OURS]), error)
    assert decision.action is RetryAction.FAIL
    assert "the quota is used up" in (decision.reason or "")


def test_wrong_arguments_are_refused_when_the_dag_is_parsed() -> None:
    with pytest.raises(ConfigurationError, match=r"our quota.*verdict"):
        SparkRetryPolicy(rules=[OURS | {"verdict": "perhaps"}])
    with pytest.raises(InvalidMessageError, match="on_unknown: 'hope' is unknown; use one of retry, fail"):
        SparkRetryPolicy(on_unknown="hope")


def test_an_exception_that_carries_evidence_is_judged_by_all_of_it() -> None:
    error = failed("nothing to see")
    error.evidence = Evidence(exit_code=1, output=traceback(SYNTAX))
    assert decide(SparkRetryPolicy(), error).action is RetryAction.FAIL


def test_a_reason_is_one_line_that_airflow_can_keep() -> None:
    long = "x" * 5000
    rule = OURS | {"reason": "y" * 2000}
    reason = decide(SparkRetryPolicy(rules=[rule]), failed(*traceback(f"OSError: OUR-QUOTA\u2028{long}"))).reason
    assert reason is not None
    assert len(reason) == 500
    assert len(reason.splitlines()) == 1


def test_a_password_does_not_reach_the_reason() -> None:
    error = failed(*traceback(f"{REFUSED} jdbc:postgresql://me:s3cret@db/x?password=s3cret"))
    assert "s3cret" not in (decide(SparkRetryPolicy(), error).reason or "")


def test_a_dag_with_the_policy_is_copied_and_stored() -> None:
    policy = SparkRetryPolicy(rules=[OURS])
    with DAG("nightly", schedule=None) as dag:
        SparkSubmitOperator(task_id="job", application="job.py", retries=3, retry_policy=policy)
    stored: Any = DagSerialization.to_dict(dag)
    assert stored["dag"]["tasks"][0]["__var"]["has_retry_policy"] is True
    copied: Any = copy.deepcopy(dag.get_task("job"))
    assert decide(copied.retry_policy, failed("OUR-QUOTA")).action is RetryAction.FAIL
