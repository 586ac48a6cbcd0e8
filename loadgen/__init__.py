"""Load against a running server: trace replay, open-loop load, reports. Speaks HTTP only."""
