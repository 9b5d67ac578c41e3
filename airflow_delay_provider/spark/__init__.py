"""Spark: tasks that come back after a failure that may pass."""
