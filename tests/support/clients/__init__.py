"""The counterparts of clients and commands: services with scripted answers."""
