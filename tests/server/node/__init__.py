"""Settings, the link, defects, and what every part of the server uses."""
