"""What each command does; a module of this room is imported when its command is run."""
