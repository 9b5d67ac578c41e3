"""A retry policy of Airflow for a plain ``SparkSubmitOperator``."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from airflow.sdk.definitions.retry_policy import RetryDecision, RetryPolicy

from airflow_delay_provider.domain.arguments import parse_choice
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.spark.failures import Classification, Rules, Verdict, classify
from airflow_delay_provider.spark.failures.classifier import evidence_of
from airflow_delay_provider.spark.failures.rules import read_rules

if TYPE_CHECKING:
    from airflow.sdk import Context

#: Airflow stores no more of a reason.
MAX_REASON = 500
SPARK_BACKOFF = Backoff(initial=timedelta(seconds=30), cap=timedelta(minutes=10), floor=timedelta(seconds=10))


class OnUnknown(StrEnum):
    """What to do about a failure that no rule knows."""

    RETRY = "retry"
    FAIL = "fail"


class SparkRetryPolicy(RetryPolicy):
    """Fail a permanent failure at once, and retry the others with exponential backoff and full jitter.

    For ``SparkSubmitOperator(retries=5, retry_policy=SparkRetryPolicy())``: each attempt is a try of its own in the
    grid. By default the delay before retry 1, 2, 3 ... is drawn from 10-30, 10-60, 10-120 ... up to 10-600 seconds, in
    place of the task's ``retry_delay``.

    A policy can stop the tries of a task early, but cannot add any. So all kinds of failures share the task's
    ``retries``, and with ``retries=0`` nothing is retried. The policy sees only the exception: of a plain operator, the
    exit code and usually the last 20 lines of spark-submit's output. ``SparkSubmitRetryOperator`` has none of these
    limits.

    :param backoff: the delays.
    :param on_unknown: ``retry`` or ``fail`` a failure that no rule knows.
    :param rules: your own rules, tried before the built-in ones.
    :param random: returns numbers in [0, 1).
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
        # Reports a mistake when the DAG is parsed, without reading the built-in rules, which takes a while.
        read_rules(rules)
        self.rules = tuple(rules)
        self.random = random

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,
        max_tries: int,  # noqa: ARG002 - Airflow itself applies it
        context: Context | None = None,  # noqa: ARG002 - the exception is enough
    ) -> RetryDecision:
        """Decide from the exception."""
        classification = classify(evidence_of(exception), Rules.builtin().extended_by(self.rules))
        reason = " ".join(f"{classification.verdict}: {classification.reason}".split())[:MAX_REASON]
        if self._is_final(classification):
            return RetryDecision.fail(reason)
        return RetryDecision.retry(delay=self.backoff.delay(try_number, self.random), reason=reason)

    def _is_final(self, classification: Classification) -> bool:
        if classification.verdict is Verdict.UNKNOWN:
            return self.on_unknown is OnUnknown.FAIL
        return classification.verdict is Verdict.PERMANENT
