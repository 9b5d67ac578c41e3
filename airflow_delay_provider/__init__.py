"""Delayed and scheduled messages in Apache Airflow."""

__version__ = "0.1.0"
