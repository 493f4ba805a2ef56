"""Dead letters: what decides by itself, and replays on the real Kafka."""
