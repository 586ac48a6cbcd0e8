"""A node in virtual time: the controller, agents and fake engines of a real one, in one thread."""
