"""The hook: one Airflow connection, one broker."""
