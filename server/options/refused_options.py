"""What of vLLM's options ``shoal serve`` refuses, and why."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from shoal.server.errors import UserError

_LORA = "LoRA is not supported"
_MULTIMODAL = "multimodal models are not supported"
_SPECULATIVE = "speculative decoding is not supported"
_POOLING = "pooling models are not supported"
_SHOAL_CHOOSES = "Shoal chooses it while it serves; use --engines and --max-group"
_EXPERTS = "mixture-of-experts models are not supported"
_TRANSFER = "transferring KV between servers is not supported"
_OFFLOAD = "offloading is not supported"
_ONE_NODE = "Shoal serves on one node"
_PROCESSES = "Shoal runs its own engine processes"
_SLEEP = "sleep mode is not supported"
_FAULTS = "Shoal supervises its engines itself"
_ROUTES = "Shoal does not offer the routes it adds"
_NOT_OFFERED = "Shoal does not offer the routes that it is for"
_LOGGING = "use --log-format, and the environment variable VLLM_LOGGING_LEVEL"
_STARTS = "Shoal bounds itself how long engines may take to meet"
_NUMA = "binding engines to NUMA nodes is not supported"

REFUSED: Mapping[str, str] = {
    "enable_lora": _LORA,
    "lora_modules": _LORA,
    "default_mm_loras": _LORA,
    "lora_target_modules": _LORA,
    "limit_mm_per_prompt": _MULTIMODAL,
    "mm_processor_kwargs": _MULTIMODAL,
    "media_io_kwargs": _MULTIMODAL,
    "enable_mm_embeds": _MULTIMODAL,
    "mm_encoder_only": _MULTIMODAL,
    "speculative_config": _SPECULATIVE,
    "spec_method": _SPECULATIVE,
    "spec_model": _SPECULATIVE,
    "spec_tokens": _SPECULATIVE,
    "diffusion_config": "diffusion models are not supported",
    "convert": _POOLING,
    "pooler_config": _POOLING,
    "enable_flash_late_interaction": _POOLING,
    "pipeline_parallel_size": "pipeline parallel is not supported",
    "tensor_parallel_size": _SHOAL_CHOOSES,
    "data_parallel_size": _SHOAL_CHOOSES,
    "data_parallel_size_local": _SHOAL_CHOOSES,
    "data_parallel_rank": _SHOAL_CHOOSES,
    "data_parallel_start_rank": _SHOAL_CHOOSES,
    "data_parallel_backend": _SHOAL_CHOOSES,
    "data_parallel_hybrid_lb": _SHOAL_CHOOSES,
    "data_parallel_external_lb": _SHOAL_CHOOSES,
    "data_parallel_multi_port_external_lb": _SHOAL_CHOOSES,
    "decode_context_parallel_size": "context parallel is not supported",
    "prefill_context_parallel_size": "context parallel is not supported",
    "enable_expert_parallel": _EXPERTS,
    "enable_eplb": _EXPERTS,
    "enable_elastic_ep": _EXPERTS,
    "enable_batch_sharded_sampling": "every member of a group samples all of its requests",
    "enable_dbo": "dual batch overlap is not supported",
    "ubatch_size": "micro-batching is not supported",
    "quantization_config": "use --quantization",
    "kv_transfer_config": _TRANSFER,
    "ec_transfer_config": _TRANSFER,
    "kv_events_config": "KV events are not supported",
    "kv_offloading_size": _OFFLOAD,
    "cpu_offload_gb": _OFFLOAD,
    "cpu_offload_params": _OFFLOAD,
    "offload_group_size": _OFFLOAD,
    "nnodes": _ONE_NODE,
    "node_rank": _ONE_NODE,
    "headless": _ONE_NODE,
    "device_ids": "choose GPUs with CUDA_VISIBLE_DEVICES",
    "distributed_executor_backend": _PROCESSES,
    "scheduler_cls": _PROCESSES,
    "worker_cls": _PROCESSES,
    "worker_extension_cls": _PROCESSES,
    "max_num_queued_reqs": "use --max-waiting-requests",
    "max_num_queued_tokens": "use --max-waiting-tokens",
    "enable_logging_iteration_details": "Shoal has its own loop around vLLM's scheduler",
    "distributed_timeout_seconds": _STARTS,
    "cpu_distributed_timeout_seconds": _STARTS,
    "numa_bind": _NUMA,
    "numa_bind_nodes": _NUMA,
    "numa_bind_cpus": _NUMA,
    "enable_shm_tensor_arena": _PROCESSES,
    "enable_sleep_mode": _SLEEP,
    "sleep_mode_offload_cudagraph": _SLEEP,
    "sleep_preserve_parameter_names": _SLEEP,
    "enable_cumem_allocator": _SLEEP,
    "enable_nccl_comm_suspend": _SLEEP,
    "enable_fault_tolerance": _FAULTS,
    "fault_tolerance_config": _FAULTS,
    "logging_config": _LOGGING,
    "log_level": _LOGGING,
    "log_config_file": _LOGGING,
    "weight_transfer_config": "changing weights while serving is not supported",
    "enable_prompt_embeds": "prompt embeddings are not supported",
    "grpc": "gRPC is not supported",
    "grpc_port": "gRPC is not supported",
    "uds": "Unix domain sockets are not supported; use --host and --port",
    "middleware": "middleware from the command line is not supported",
    "enable_ssl_refresh": "refreshing certificates is not supported",
    "enable_offline_docs": _ROUTES,
    "enable_scale_out": _ROUTES,
    "tokens_only": _ROUTES,
    "cohere_is_reasoning_model": _NOT_OFFERED,
    "anthropic_disabled_thinking_effort": _NOT_OFFERED,
    "profiler_config": _ROUTES,
}
"""Options of vLLM that ``shoal serve`` refuses when they are set, and why."""

FP8_QUANTIZATION = frozenset(
    {"fp8", "compressed-tensors", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"}
)
"""vLLM's names of quantisations that every layout can serve: FP8 weights.

Of compressed-tensors only the FP8 schemes (``unsupported_models.check_quantisation``).
"""


def check_vllm_options(args: Namespace, default_of: Callable[[str], Any]) -> None:
    """Refuse options of vLLM's that Shoal does not support.

    Args:
        args: the parsed arguments.
        default_of: returns the default of an argument.

    Raises:
        UserError: the first such option; the message names it.
    """
    for name, reason in REFUSED.items():
        # Some of vLLM's are there only if they are given.
        if hasattr(args, name) and getattr(args, name) != default_of(name):
            raise UserError(f"--{name.replace('_', '-')}: {reason}")
    if args.quantization not in (None, *FP8_QUANTIZATION):
        raise UserError(f"--quantization {args.quantization}: only FP8 weights are supported")
    if args.runner not in ("auto", "generate"):
        raise UserError(f"--runner {args.runner}: {_POOLING}")
