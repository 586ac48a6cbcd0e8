"""Options of commands: what they mean, and which are refused."""
