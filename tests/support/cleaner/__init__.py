"""A cleaner's parts and its process, with fakes for their environment."""
