"""The parts of a DataFrame's way into the inbox of a Kafka ladder, by Spark's own Kafka sink."""
