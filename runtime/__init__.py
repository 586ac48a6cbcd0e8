"""What all processes share: configuration, the models that can be served, the clock, logs."""
