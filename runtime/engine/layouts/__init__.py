"""vLLM's configuration and stock worker of each layout, and how its steps run, by mode."""
