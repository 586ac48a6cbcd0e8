"""The scheduler process of a real engine: one vLLM core for each unit that it leads."""
