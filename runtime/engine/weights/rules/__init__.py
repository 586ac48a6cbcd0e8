"""How the layers of one kind share the full weights: a rule for each kind."""
