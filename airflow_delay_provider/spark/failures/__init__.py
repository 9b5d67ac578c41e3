"""Classify Spark failures: transient, infrastructure, resource, permanent or unknown, by which rule and line."""

from __future__ import annotations

from airflow_delay_provider.spark.failures.classifier import Classification, Evidence, classify
from airflow_delay_provider.spark.failures.log_text import OutputWindow
from airflow_delay_provider.spark.failures.rules import Rules, Verdict

__all__ = ["Classification", "Evidence", "OutputWindow", "Rules", "Verdict", "classify"]
