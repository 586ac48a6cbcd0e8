"""Requests on their way into the task pool, to units, back, and out at the end."""
