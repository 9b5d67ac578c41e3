"""Spark retries: everything except the classes that a DAG author or Airflow names.

A job fails -> ``failures`` classifies it -> ``retries`` decides -> ``tickets`` schedules the next attempt ->
``admission`` lets the due ticket through, once ``cluster`` is up -> ``process`` submits the job again.
"""
