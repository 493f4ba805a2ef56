"""The server process as a whole: starts, calls, ends, and trouble."""
