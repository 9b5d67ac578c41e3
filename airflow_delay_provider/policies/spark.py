"""When a plain ``SparkSubmitOperator`` is worth another try, and after how long."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from airflow.sdk.definitions.retry_policy import RetryDecision, RetryPolicy

from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.schedule import parse_choice
from airflow_delay_provider.spark.failures import Finding, Rules, Verdict, classify
from airflow_delay_provider.spark.failures.rule_entries import read_rules
from airflow_delay_provider.spark.raised import evidence_of

if TYPE_CHECKING:
    from airflow.sdk import Context

#: Airflow keeps no more of a reason.
MAX_REASON = 500
SPARK_BACKOFF = Backoff(initial=timedelta(seconds=30), cap=timedelta(minutes=10), floor=timedelta(seconds=10))


class OnUnknown(StrEnum):
    """What follows from a failure that no rule knows."""

    RETRY = "retry"
    FAIL = "fail"


class SparkRetryPolicy(RetryPolicy):
    """Fail at once what will fail again, and retry the rest with exponential backoff and full jitter.

    For ``SparkSubmitOperator(retries=5, retry_policy=SparkRetryPolicy())``: each attempt is a try of its own in the
    grid. By default the delay before retry 1, 2, 3 ... is drawn from 10-30, 10-60, 10-120 ... up to 10-600 seconds, in
    place of the task's ``retry_delay``.

    A policy can end the tries of a task early and never add one. So failures of all kinds share the task's ``retries``,
    and with ``retries=0`` nothing is retried whatever the policy says. It knows what the exception tells: of a plain
    operator that is the exit code and, as a rule, the last 20 lines of spark-submit's output.
    ``SparkSubmitRetryOperator`` has none of these limits.

    :param backoff: the delays.
    :param on_unknown: ``retry`` or ``fail`` what no rule knows.
    :param rules: rules of your own, asked before the built-in ones.
    :param random: gives numbers in [0, 1).
    """

    def __init__(
        self,
        *,
        backoff: Backoff = SPARK_BACKOFF,
        on_unknown: OnUnknown | str = OnUnknown.RETRY,
        rules: Sequence[Mapping[str, Any]] = (),
        random: Callable[[], float] = random.random,
    ) -> None:
        self.backoff = backoff
        self.on_unknown = parse_choice("on_unknown", OnUnknown, on_unknown)
        # A mistake shows when the DAG is parsed; the built-in rules, which take a while to read, are left alone.
        read_rules(rules)
        self.rules = tuple(rules)
        self.random = random

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,
        max_tries: int,  # noqa: ARG002 - Airflow itself keeps to it
        context: Context | None = None,  # noqa: ARG002 - the exception tells enough
    ) -> RetryDecision:
        """Decide from what the exception tells."""
        finding = classify(evidence_of(exception), Rules.builtin().extended_by(self.rules))
        reason = " ".join(f"{finding.verdict}: {finding.reason}".split())[:MAX_REASON]
        if self._is_final(finding):
            return RetryDecision.fail(reason)
        return RetryDecision.retry(delay=self.backoff.delay(try_number, self.random), reason=reason)

    def _is_final(self, finding: Finding) -> bool:
        if finding.verdict is Verdict.UNKNOWN:
            return self.on_unknown is OnUnknown.FAIL
        return finding.verdict is Verdict.PERMANENT
