"""How long steps take, from which policies predict."""
