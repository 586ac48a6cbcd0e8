"""The controller: one process that owns the task pool, the partition and every lease.

To the front ends it looks like one vLLM engine core. It decides through a policy (``policies``) and
acts through messages. It imports neither vLLM nor torch.
"""
