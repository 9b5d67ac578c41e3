"""Schedule each row of a file as a message, with Spark, and wait until the last one was dispatched.

Define a connection that runs Spark inside the task, or give the connection of a cluster with {"spark": "spark_default"}:

    airflow connections add spark_local --conn-type spark --conn-host 'local[2]'

Start it with {"input": "/data/reminders.parquet"}; without an input it writes a small one. On a cluster, name a folder
that all machines share. The ids depend on the run, so a run that is repeated schedules nothing twice where the broker
knows ids.
"""
