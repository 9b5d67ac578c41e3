"""Delayed messages in Kafka: a ladder of topics, and dispatchers that deliver exactly once."""
