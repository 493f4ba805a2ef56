"""What calls and waits: threads, or one event loop."""
