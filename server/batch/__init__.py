"""Batch work: OpenAI's Files and Batches, their store, and the process that works them off."""
