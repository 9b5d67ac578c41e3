"""What Airflow's api-server shows of messages."""
