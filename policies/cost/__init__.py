"""How long steps take: what predictions of policies are made from."""
