"""Which types the KV cache may have. This module imports neither vLLM nor torch."""

KV_TYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""VLLM's names of types whose tokens each consist of bytes of their own, with scales that come from
the checkpoint and are the same on every engine. So every layout can read what another has written.
"""
