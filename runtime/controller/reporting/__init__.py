"""The controller's books as operators see them."""
