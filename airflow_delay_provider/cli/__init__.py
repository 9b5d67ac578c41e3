"""`airflow delay ...`: schedule, look at, control and consume messages from a shell."""
