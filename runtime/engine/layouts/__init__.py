"""One vLLM configuration and one stock worker for each layout."""
