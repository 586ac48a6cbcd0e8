"""``shoal bench``: what a node costs and gains, measured over its public API."""
