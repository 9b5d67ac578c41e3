"""The page is true: what it shows runs, and prints what it says."""

from __future__ import annotations

import re

import pytest
import yaml

from airflow_delay_provider.spark.failures import Evidence, Rules, Verdict, classify
from tests.spark_corpus.report import PAGE

TEXT = PAGE.read_text(encoding="utf-8")
RULES = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)[0]


@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
def test_a_snippet_prints_what_the_page_says(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(snippet, str(PAGE), "exec"), {"RULES": RULES})

    assert capsys.readouterr().out.splitlines() == [
        line.removeprefix("# ") for line in snippet.splitlines() if line.startswith("# ")
    ]


@pytest.mark.parametrize(
    ("evidence", "rule"),
    [
        (Evidence(output=["shop.TooFewOrders: 3"]), "orders-late"),
        (Evidence(output=["BOOKS CLOSED since Monday", "java.net.ConnectException: refused"]), "month-closed"),
        (Evidence(exit_code=42), "asks-for-later"),
        (Evidence(output=["SparkRuntimeException: [USER_RAISED_EXCEPTION] odd SQLSTATE: P0001"]), "region-odd"),
    ],
)
def test_the_rules_of_the_page_do_what_they_say(evidence: Evidence, rule: str) -> None:
    assert classify(evidence, Rules.builtin().extended_by(yaml.safe_load(RULES))).rule == rule


def test_every_verdict_is_explained() -> None:
    assert all(f"| {verdict} |" in TEXT for verdict in Verdict)
