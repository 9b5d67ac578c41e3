"""Kafka: a ladder of topics that dispatchers climb, exactly once."""
