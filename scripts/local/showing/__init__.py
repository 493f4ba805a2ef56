"""What the demo shows beside the crowd: single messages, and what becomes of each."""
