"""The front end: a process with vLLM's ``AsyncLLM`` and its OpenAI routes."""
