"""The checks before the model's routes: who sends a request, what it asks for, and how much."""
