"""The process that owns a device: how it loads, what it does, what it records."""
