"""Linear layers over ranges of a weight's rows, and routed experts on views."""
