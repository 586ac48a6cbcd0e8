"""From one layout to another, and from one threshold of the shift to another."""
