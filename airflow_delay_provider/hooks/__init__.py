"""Hooks: one Airflow connection, one broker."""
