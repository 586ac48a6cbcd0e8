"""The process that owns a device."""
