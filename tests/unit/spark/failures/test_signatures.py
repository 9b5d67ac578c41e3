"""Failures that cannot be made here: stores, databases, YARN, Kubernetes, Kerberos."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from airflow_delay_provider.spark.failures import Evidence, OutputWindow, Verdict, classify

SIGNATURES = yaml.safe_load((Path(__file__).parent / "signatures.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        pytest.param(verdict, text, id=f"{verdict}-{name}")
        for verdict, signatures in SIGNATURES.items()
        for name, text in signatures.items()
    ],
)
def test_a_known_ending_gets_its_verdict(verdict: str, text: str) -> None:
    window = OutputWindow()
    for line in text.splitlines():
        window.feed(line)

    classification = classify(Evidence(exit_code=1, output=window.lines()))

    assert classification.verdict is Verdict(verdict), classification
