"""The commands of `airflow delay`."""
