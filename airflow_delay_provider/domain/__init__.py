"""Messages, time and rules. Pure: no I/O, no Airflow."""
