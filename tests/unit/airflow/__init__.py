"""Tests of the Airflow surface."""
