"""What a request passes before it reaches the model's routes: who asks, for what, and how much."""
