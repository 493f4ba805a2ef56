"""A cleaner's parts and its process, with fakes for what surrounds them."""
