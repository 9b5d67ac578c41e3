"""What Airflow mounts; found by the entry point ``airflow.plugins``."""
