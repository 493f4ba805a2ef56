"""Processes: descriptors, lateness of their loops, scripts run as users run them."""
