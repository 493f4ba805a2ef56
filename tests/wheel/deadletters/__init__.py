"""Dead letters: pure decisions, and replays on the real Kafka."""
