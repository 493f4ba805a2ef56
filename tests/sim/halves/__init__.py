"""Half messages in the simulation: how they are sent, who is asked about them, what must hold."""
