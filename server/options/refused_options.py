"""The options of vLLM that ``shoal serve`` refuses, and why."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.runtime.served_weights import FP8_QUANTISATIONS
from shoal.server.errors import UserError
from shoal.server.number_options import flag_of
from shoal.server.options.image_options import images_alone

_POOLING = "pooling models are not supported"

_REFUSED: Mapping[str, Sequence[str]] = {
    "of LoRA, only plain adapters of text models are supported": (
        *("default_mm_loras", "lora_target_modules", "fully_sharded_loras"),
        *("enable_tower_connector_lora", "enable_mixed_moe_lora_format"),
        *("enable_moe_shared_loras", "max_lora_cls_labels"),
    ),
    "clients send images, not what an encoder made of them": ("enable_mm_embeds",),
    "clients name no files of this machine": ("allowed_local_media_path",),
    "the encoder runs in the engines, beside the language model": ("mm_encoder_only",),
    "features of images travel in messages, and front ends make and keep them on the host": (
        *("mm_processor_cache_type", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb"),
        "mm_processor_device",
    ),
    "use --speculative-config": ("spec_method", "spec_model", "spec_tokens"),
    "each unit counts the drafts that it has checked, not those of a whole request": (
        "per_request_spec_decode_metrics",
    ),
    "diffusion models are not supported": ("diffusion_config",),
    _POOLING: ("convert", "pooler_config", "enable_flash_late_interaction"),
    "Shoal chooses it while it serves; use --max-pp": ("pipeline_parallel_size",),
    "Shoal chooses it while it serves; use --engines and --max-group": (
        *("tensor_parallel_size", "data_parallel_size", "data_parallel_size_local"),
        *("data_parallel_rank", "data_parallel_start_rank", "data_parallel_backend"),
        *("data_parallel_hybrid_lb", "data_parallel_external_lb"),
        "data_parallel_multi_port_external_lb",
    ),
    "context parallel is not supported": (
        *("decode_context_parallel_size", "prefill_context_parallel_size"),
    ),
    "use --whole-experts, which says it of groups": ("enable_expert_parallel",),
    "copies of experts are not supported": ("enable_eplb", "enable_elastic_ep"),
    "returning which experts computed a token is not supported": ("enable_return_routed_experts",),
    "every member of a group samples all of its requests": ("enable_batch_sharded_sampling",),
    "dual batch overlap is not supported": ("enable_dbo",),
    "micro-batching is not supported": ("ubatch_size",),
    "use --quantization": ("quantization_config",),
    "transferring KV between servers is not supported": (
        *("kv_transfer_config", "ec_transfer_config"),
    ),
    "KV events are not supported": ("kv_events_config",),
    "offloading is not supported": (
        *("kv_offloading_size", "cpu_offload_gb", "cpu_offload_params", "offload_group_size"),
    ),
    "Shoal serves on one node": ("nnodes", "node_rank", "headless"),
    "choose GPUs with CUDA_VISIBLE_DEVICES": ("device_ids",),
    "Shoal runs its own engine processes": (
        *("distributed_executor_backend", "scheduler_cls", "worker_cls"),
        *("worker_extension_cls", "enable_shm_tensor_arena"),
    ),
    "use --max-waiting-requests": ("max_num_queued_reqs",),
    "use --max-waiting-tokens": ("max_num_queued_tokens",),
    "Shoal has its own loop around vLLM's scheduler": ("enable_logging_iteration_details",),
    "Shoal bounds itself how long engines may take to meet": (
        *("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"),
    ),
    "binding engines to NUMA nodes is not supported": (
        *("numa_bind", "numa_bind_nodes", "numa_bind_cpus"),
    ),
    "sleep mode is not supported": (
        *("enable_sleep_mode", "sleep_mode_offload_cudagraph"),
        *("sleep_preserve_parameter_names", "enable_cumem_allocator"),
        "enable_nccl_comm_suspend",
    ),
    "Shoal supervises its engines itself": ("enable_fault_tolerance", "fault_tolerance_config"),
    "use --log-format, and the environment variable VLLM_LOGGING_LEVEL": (
        *("logging_config", "log_level", "log_config_file"),
    ),
    "changing weights while serving is not supported": ("weight_transfer_config",),
    "prompt embeddings are not supported": ("enable_prompt_embeds",),
    "gRPC is not supported": ("grpc", "grpc_port"),
    "Unix domain sockets are not supported; use --host and --port": ("uds",),
    "middleware from the command line is not supported": ("middleware",),
    "refreshing certificates is not supported": ("enable_ssl_refresh",),
    "Shoal does not offer the routes it adds": (
        *("enable_offline_docs", "enable_scale_out", "tokens_only", "profiler_config"),
    ),
    "Shoal does not offer the routes that it is for": (
        *("cohere_is_reasoning_model", "anthropic_disabled_thinking_effort"),
    ),
}

REFUSED: Mapping[str, str] = {name: why for why, names in _REFUSED.items() for name in names}
"""Options of vLLM that ``shoal serve`` refuses when they are set, and why."""


def check_vllm_options(args: Namespace, default_of: Callable[[str], Any]) -> None:
    """Refuse options of vLLM's that Shoal does not support.

    Args:
        args: the parsed arguments.
        default_of: returns the default of an argument.

    Raises:
        UserError: the first such option; the message names it.
    """
    for name, reason in REFUSED.items():
        # Some of vLLM's options are in the arguments only if the user gives them.
        if hasattr(args, name) and getattr(args, name) != default_of(name):
            raise UserError(f"{flag_of(name)}: {reason}")
    images_alone(getattr(args, "limit_mm_per_prompt", {}))
    if args.quantization not in (None, *FP8_QUANTISATIONS):
        raise UserError(
            f"--quantization {args.quantization}: only FP8 weights can be asked for; GPTQ, "
            "AWQ, MXFP4 and integers are recognised by their checkpoints"
        )
    if args.runner not in ("auto", "generate"):
        raise UserError(f"--runner {args.runner}: {_POOLING}")
