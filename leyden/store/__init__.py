"""The durable truth and the queue."""
