"""Submits a job as a task of Airflow does, whose ``on_kill`` runs in the handler of SIGTERM: settings, application."""

from __future__ import annotations

import json
import signal
import sys

from airflow_delay_provider.spark.process import submit as spark

# Airflow kills a task after five seconds; a spark-submit on a busy machine may not say a word in them.
spark.DRIVER_ID_SECONDS = 30.0
settings = json.loads(sys.argv[1])
hook = spark.GuardedSparkSubmitHook(**settings)
signal.signal(signal.SIGTERM, lambda *_: hook.on_kill())
print("submitting", flush=True)
hook.submit(sys.argv[2])
