"""RabbitMQ holds the wait: a ladder of queues that expire, declared once, with no plugin and no process of ours."""
