"""Engines that are silent or dead: what is lost with them, and how they come back."""
