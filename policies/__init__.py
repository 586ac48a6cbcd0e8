"""Pure policies: from a frozen snapshot of the node to a frozen plan. No vLLM, no torch, no I/O."""
