"""An engine: a scheduler process that owns its block pool, a runner process that owns its GPU."""
