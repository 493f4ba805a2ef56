"""What others learn of a consumer: its health, what happens in it, and its metrics."""
