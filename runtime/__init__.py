"""The runtime: controller, engine processes, and every message between them."""
