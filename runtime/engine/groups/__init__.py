"""Groups of engines: how members meet, and their communicators."""
