"""What operators see and do: the admin API, metrics and traces."""
