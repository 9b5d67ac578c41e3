"""The parts of the dispatcher that runs on Spark Structured Streaming (``spark/jobs/dispatch.py``)."""
