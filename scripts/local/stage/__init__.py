"""A cluster under traffic and a careful reader: the stage of the demo, chaos and the bench."""
