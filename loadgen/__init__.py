"""Workloads, and reports of how they were served. Load reaches a server over HTTP only."""
