"""Policies: pure functions from a frozen snapshot of the node to a plan, without vLLM or I/O."""
