"""Classify Spark failures: transient, infrastructure, resource, permanent or unknown, by which rule and line."""

from __future__ import annotations

from airflow_delay_provider.spark.failures.classifier import classify
from airflow_delay_provider.spark.failures.evidence import Evidence
from airflow_delay_provider.spark.failures.log_text import OutputWindow
from airflow_delay_provider.spark.failures.rules import Rules
from airflow_delay_provider.spark.failures.verdict import Classification, Verdict

__all__ = ["Classification", "Evidence", "OutputWindow", "Rules", "Verdict", "classify"]
