"""The controller: one process that owns the task pool, the partition and every lease.

To the front ends it looks like one vLLM engine core. It decides through a policy (``policies``) and
acts by messages; it imports no vLLM and no torch.
"""
