"""Everything about Spark, except the classes that a DAG author or Airflow names.

Retries: a job fails -> ``failures`` classifies it -> ``retries`` decides -> ``tickets`` schedules the next attempt ->
``admission`` lets the due ticket through, once ``cluster`` is up -> ``process`` submits the job again.

The data pipeline: ``datasource`` and ``kafka_sink`` schedule DataFrames, ``datasource`` reads messages and journals,
``streaming`` dispatches; ``jobs`` are the programs that spark-submit runs, and ``connection`` is how they connect.
"""
