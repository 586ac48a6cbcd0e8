"""Linear layers over parts of a weight."""
