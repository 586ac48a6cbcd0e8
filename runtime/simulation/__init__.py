"""A node in virtual time: the real controller and agents with fake engines, in one thread."""
