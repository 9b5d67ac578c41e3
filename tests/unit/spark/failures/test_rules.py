"""Custom rules: their syntax, and refused input."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.failures import Evidence, Rules, Verdict, classify

RULE = {"name": "odd-orders", "verdict": "transient", "reason": "orders come late", "text": "TooFewOrders"}


def output(*lines: str) -> Evidence:
    return Evidence(exit_code=1, output=["Traceback (most recent call last):", *lines])


def test_own_rules_are_asked_before_the_built_in_ones() -> None:
    rules = Rules.builtin().extended_by([{**RULE, "text": "KeyError: 'eu'"}])

    assert classify(output("KeyError: 'eu'"), rules).rule == "odd-orders"
    assert classify(output("KeyError: 'us'"), rules).verdict is Verdict.PERMANENT


def test_own_rules_see_the_data_that_the_built_in_ones_are_not_shown() -> None:
    said = output("shop.Odd: value 'timed out' in s3a://shop/late/orders.csv")
    rules = Rules.builtin().extended_by([{**RULE, "text": "value 'timed out' in s3a://shop/late/"}])

    assert classify(said).verdict is Verdict.UNKNOWN
    assert classify(said, rules).rule == "odd-orders"


def test_the_latest_layer_is_asked_first() -> None:
    rules = Rules.builtin().extended_by([RULE]).extended_by([{**RULE, "name": "newer", "verdict": "permanent"}])

    assert classify(output("shop.TooFewOrders: 3"), rules).rule == "newer"


def test_the_built_in_rules_are_not_changed_by_an_extension() -> None:
    Rules.builtin().extended_by([RULE])

    assert classify(output("shop.TooFewOrders: 3")).verdict is Verdict.UNKNOWN


def test_a_rule_that_looks_anywhere_sees_what_the_application_prints() -> None:
    rules = Rules.builtin().extended_by([{**RULE, "where": "anywhere", "text": "^NOT READY"}])
    evidence = Evidence(exit_code=1, output=["NOT READY yet", "Traceback (most recent call last):", "KeyError: 'x'"])

    assert classify(evidence, rules).verdict is Verdict.TRANSIENT


@pytest.mark.parametrize(
    ("criterion", "evidence"),
    [
        ({"exception": ["TooFewOrders"]}, output("shop.TooFewOrders: 3")),
        ({"condition": ["USER_RAISED_EXCEPTION"]}, output("SparkRuntimeException: [USER_RAISED_EXCEPTION] x")),
        ({"condition": ["A_B.C"]}, output("SparkException: [A_B.C] x")),
        ({"sqlstate": "P0001"}, output("SparkException: x SQLSTATE: P0001")),
        ({"exit_code": 7}, Evidence(exit_code=7)),
        ({"driver_state": "FAILED"}, Evidence(driver_state="FAILED")),
        ({"pod_reason": ["DeadlineExceeded"]}, Evidence(pod_reason="DeadlineExceeded")),
    ],
)
def test_every_criterion_is_enough(criterion: dict[str, Any], evidence: Evidence) -> None:
    rule = {name: value for name, value in RULE.items() if name != "text"} | criterion

    assert classify(evidence, Rules.builtin().extended_by([rule])).rule == "odd-orders"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"verdict": "maybe"}, "'odd-orders': verdict is 'maybe'; use transient, infrastructure"),
        ({"where": "here"}, "'odd-orders': where is 'here'; use anywhere, failure, cause, last"),
        ({"text": "("}, "'odd-orders': text '(' is not a regular expression"),
        ({"text": "(a+)+$"}, "'odd-orders': text '(a+)+$' has nested repeats; write it without"),
        ({"text": r"(?:\w*\d*)*x"}, "has nested repeats"),
        ({"text": 7}, "'odd-orders': text is 7; give a text or a list of texts"),
        ({"text": ""}, "'odd-orders': text is missing, and so is every other criterion; give one of text, exception"),
        ({"exit_code": "137"}, "'odd-orders': exit_code is '137'; give a whole number"),
        ({"exit_code": [True]}, "'odd-orders': exit_code is [True]; give a whole number"),
        ({"sqlstate": [42]}, "'odd-orders': sqlstate is [42]; give a text or a list of texts (quote numbers)"),
        ({"reason": ""}, "'odd-orders': reason is ''; give one line of text"),
        ({"name": None}, "name is None; give one line of text"),
        ({"patern": "x"}, "'odd-orders': patern is not a field of a rule; use name, verdict"),
    ],
)
def test_a_bad_rule_is_refused_with_rule_field_and_remedy(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Rules.builtin().extended_by([{**RULE, **change}])

    assert problem in str(refused.value)


def test_a_document_that_is_no_list_of_rules_is_refused() -> None:
    for wrong in (RULE, "rules", [RULE, RULE], ["rule"]):
        with pytest.raises(ConfigurationError):
            Rules.builtin().extended_by(wrong)  # type: ignore[arg-type]


def test_no_extension_changes_nothing() -> None:
    assert Rules.builtin().extended_by([]) is Rules.builtin()
