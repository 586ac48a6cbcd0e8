"""The demo model: its checkpoint, and how that is made."""
