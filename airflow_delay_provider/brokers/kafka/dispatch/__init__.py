"""The dispatcher of a Kafka ladder."""
