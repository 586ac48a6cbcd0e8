"""Options of the commands: what they mean, and which of vLLM's are refused."""
