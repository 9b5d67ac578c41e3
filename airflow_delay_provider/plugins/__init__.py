"""The Airflow plugin, found by the entry point ``airflow.plugins``."""
