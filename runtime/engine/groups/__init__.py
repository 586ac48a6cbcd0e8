"""Groups: how members meet, their communicators, memory that all reach, who holds which heads."""
