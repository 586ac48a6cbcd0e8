"""What runs between an engine's scheduler process and its runners."""
