"""What a Spark failure was: transient, infrastructure, resource, permanent or unknown, and by which rule and line."""

from __future__ import annotations

from airflow_delay_provider.spark.failures.classifier import classify
from airflow_delay_provider.spark.failures.evidence import Evidence
from airflow_delay_provider.spark.failures.rules import Rules
from airflow_delay_provider.spark.failures.verdict import Finding, Verdict
from airflow_delay_provider.spark.failures.window import OutputWindow

__all__ = ["Evidence", "Finding", "OutputWindow", "Rules", "Verdict", "classify"]
