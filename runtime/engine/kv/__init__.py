"""The one KV buffer of an engine, the blocks lent to its groups, and KV read from other engines."""
