"""Reading a wheel that another process may be writing."""
