"""Engines that are silent or dead: what they take with them, how they come back."""
