"""What processes tell each other, and the ways on which it travels."""
