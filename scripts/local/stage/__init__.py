"""A cluster under traffic and a careful reader: what the demo, chaos and the bench play on."""
