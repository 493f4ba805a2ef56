"""What becomes of a record: outcomes by exceptions and attempts, delays before retries, routes."""
