"""The processes of a node: who starts, watches and ends them, and where they meet."""
