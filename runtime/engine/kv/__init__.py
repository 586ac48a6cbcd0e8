"""The one KV buffer of an engine, and the blocks that members lend their group."""
