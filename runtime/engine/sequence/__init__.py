"""Steps by sequence: SP on the requests, weights and KV cache of TP."""
