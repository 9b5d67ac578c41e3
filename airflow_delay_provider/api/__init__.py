"""The message page in Airflow's API server."""
