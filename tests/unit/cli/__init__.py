"""`airflow delay ...`, run in this process through the parser that Airflow builds from its definition."""
