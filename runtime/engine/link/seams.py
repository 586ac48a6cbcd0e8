"""What Shoal needs of vLLM: its version and the functions that Shoal uses, checked at start."""

import importlib
from dataclasses import dataclass

VLLM_VERSION = "0.32.0"


class UnsupportedVllm(RuntimeError):
    """The installed vLLM is not the one that Shoal needs; the message is one line."""


@dataclass(frozen=True)
class Seam:
    """One attribute of vLLM that a module of Shoal relies on."""

    module: str
    attribute: str
    used_by: str


_LAYERS = "vllm.model_executor.layers"
_BROADCAST = "vllm.distributed.device_communicators.shm_broadcast"
_DISPATCHER = "vllm.v1.cudagraph_dispatcher"
_V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
_V2_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
_ATTENTION = f"{_LAYERS}.attention.attention"
_CUDA = "vllm.distributed.device_communicators.cuda_wrapper"
_SCALED_MM = "vllm.model_executor.kernels.linear.scaled_mm"

SEAMS = (
    Seam("vllm.v1.engine.core", "EngineCore.preprocess_add_request", "vllm_core"),
    Seam("vllm.v1.engine.core", "EngineCore.add_request", "vllm_core"),
    Seam("vllm.v1.engine.core", "EngineCore.abort_requests", "vllm_core"),
    Seam("vllm.v1.core.sched.scheduler", "Scheduler.schedule", "vllm_core"),
    Seam("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", "vllm_core"),
    Seam("vllm.v1.core.sched.scheduler", "Scheduler.get_grammar_bitmask", "vllm_core"),
    Seam("vllm.v1.core.sched.scheduler", "Scheduler._preempt_request", "block_holders"),
    Seam("vllm.v1.core.sched.scheduler", "Scheduler.update_draft_token_ids", "vllm_core"),
    Seam("vllm.v1.core.sched.scheduler", "Scheduler.update_draft_token_ids_in_output", "vllm_core"),
    Seam("vllm.v1.core.sched.scheduler", "Scheduler._holds_kv_blocks", "carried_requests"),
    Seam(
        "vllm.v1.core.sched.scheduler", "Scheduler._is_blocked_waiting_status", "carried_requests"
    ),
    Seam("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_block_ids", "block_holders"),
    Seam("vllm.v1.kv_cache_interface", "KVCacheTensor", "backing"),
    Seam("vllm.v1.core.kv_cache_manager", "KVCacheManager.allocate_slots", "carried_requests"),
    Seam("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_computed_blocks", "carried_requests"),
    Seam(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.estimate_cached_tokens",
        "carried_requests",
    ),
    Seam(
        "vllm.v1.core.kv_cache_manager", "KVCacheManager.create_kv_cache_blocks", "carried_requests"
    ),
    Seam(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.get_block_ids_for_computed_tokens",
        "carried_requests",
    ),
    Seam("vllm.v1.structured_output", "StructuredOutputManager.accept_tokens", "grammar_replay"),
    Seam("vllm.v1.core.block_pool", "BlockPool.get_new_blocks", "lease"),
    Seam("vllm.v1.core.block_pool", "BlockPool.free_blocks", "lease"),
    Seam("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue", "lease"),
    Seam(
        "vllm.v1.kv_cache_interface",
        "SlidingWindowSpec.max_admission_blocks_per_request",
        "kv_groups",
    ),
    Seam("vllm.v1.core.block_pool", "BlockPool.evict_blocks", "vllm_core"),
    Seam("vllm.v1.core.block_pool", "BlockPool.touch", "blocks_ahead"),
    Seam("vllm.v1.core.block_pool", "BlockPool.move_block_hashes", "vacated_blocks"),
    Seam(
        "vllm.v1.core.kv_cache_utils",
        "FreeKVCacheBlockQueue.get_all_free_blocks",
        "vacated_blocks",
    ),
    Seam("vllm.v1.core.kv_cache_utils", "get_group_id", "vacated_blocks"),
    Seam("vllm.v1.core.block_pool", "BlockPool.cache_full_blocks", "blocks_ahead"),
    Seam(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.prefix_cache_lookup_enabled",
        "blocks_ahead",
    ),
    Seam("vllm.v1.core.kv_cache_utils", "resolve_block_hashes", "blocks_ahead"),
    Seam("vllm.multimodal.utils", "strip_covered_mm_data", "carried_requests"),
    Seam("vllm.multimodal.encoder_budget", "MultiModalBudget", "encoder_cache"),
    Seam("vllm.multimodal.cache.factories", "_get_cache_type", "layout_configs"),
    Seam("vllm.multimodal.cache.base", "MultiModalCache.get_item_size", "checked_llm"),
    Seam("vllm.v1.structured_output", "StructuredOutputManager.grammar_init", "grammars"),
    Seam("vllm.v1.structured_output", "StructuredOutputManager.clear_backend", "grammar_backends"),
    Seam("vllm.sampling_params", "SamplingParams._validate_structured_outputs", "grammars"),
    Seam("vllm.v1.executor.abstract", "Executor.supports_async_scheduling", "executor"),
    Seam("vllm.v1.executor.abstract", "Executor.supports_pp", "executor"),
    Seam("vllm.config.cache", "CacheConfig.kv_cache_layout", "engine_config"),
    Seam("vllm.distributed.parallel_state", "init_world_group", "communicators"),
    Seam("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_worker", "layout_worker"),
    Seam("vllm.v1.worker.worker_base", "WorkerBase.add_lora", "adapters"),
    Seam(
        "vllm.v1.worker.lora_model_runner_mixin", "LoRAModelRunnerMixin.load_lora_model", "adapters"
    ),
    Seam(
        "vllm.v1.worker.lora_model_runner_mixin",
        "LoRAModelRunnerMixin._set_active_loras",
        "step_adapters",
    ),
    Seam("vllm.lora.worker_manager", "WorkerLoRAManager.set_active_adapters", "step_adapters"),
    Seam("vllm.lora.model_manager", "LoRAModelManager.get_adapter", "adapters"),
    Seam("vllm.lora.utils", "is_in_target_modules", "adapters"),
    Seam("vllm.model_executor.layers.fused_moe.config", "FusedMoEConfig", "experts"),
    Seam("vllm.lora.layers", "LoRAMapping", "step_adapters"),
    Seam("vllm.lora.layers.utils", "_get_lora_device", "view_loader"),
    Seam("vllm.compilation.wrapper", "TorchCompileWithNoGuardsWrapper.cleanup", "layout_worker"),
    Seam("vllm.v1.worker.gpu_model_runner", "allocate_kv_cache", "kv_cache"),
    Seam("vllm.v1.worker.gpu.attn_utils", "allocate_kv_cache", "kv_cache"),
    Seam("vllm.v1.kv_cache_interface", "create_kv_cache_views", "kv_cache"),
    Seam("vllm.v1.worker.utils", "select_common_block_size", "vllm_pages"),
    Seam("vllm.v1.kv_cache_interface", "KVCacheLayout.BLNHC", "vllm_pages"),
    Seam("vllm.v1.attention.backends.cpu_attn", "_get_attn_isa", "vllm_pages"),
    Seam("vllm._custom_ops", "cpu_attn_reshape_and_cache", "cpu_pages"),
    Seam(_CUDA, "CudaRTLibrary.cudaIpcGetMemHandle", "kv_memory"),
    Seam(_CUDA, "CudaRTLibrary.cudaIpcOpenMemHandle", "kv_memory"),
    Seam("vllm.v1.worker.gpu_input_batch", "CachedRequestState", "arrivals"),
    Seam("vllm.v1.worker.gpu_input_batch", "InputBatch.remove_request", "arrivals"),
    Seam(_V1_RUNNER, "GPUModelRunner._init_mrope_positions", "arrivals"),
    Seam("vllm.v1.sample.ops.topk_topp_sampler", "TopKTopPSampler.forward_native", "arrivals"),
    Seam("vllm.v1.worker.workspace", "_manager", "communicators"),
    Seam("vllm.engine.arg_utils", "AsyncEngineArgs.create_engine_config", "layout_configs"),
    Seam("vllm.engine.arg_utils", "AsyncEngineArgs.from_cli_args", "vllm_options"),
    Seam(
        "vllm.transformers_utils.config",
        "maybe_register_config_serialize_by_value",
        "layout_configs",
    ),
    Seam("vllm.distributed.parallel_state", "initialize_model_parallel", "communicators"),
    Seam("vllm.distributed.parallel_state", "set_custom_all_reduce", "communicators"),
    Seam("vllm.distributed.parallel_state", "GroupCoordinator.destroy", "communicators"),
    Seam("vllm.distributed.parallel_state", "_group_name_counter", "communicators"),
    Seam(_BROADCAST, "Handle.local_subscribe_addr", "communicators"),
    Seam(_BROADCAST, "Handle.local_notify_addr", "communicators"),
    Seam("vllm.distributed.parallel_state", "_WORLD", "communicators"),
    Seam("vllm.distributed.parallel_state", "_TP", "communicators"),
    Seam("torch.distributed.distributed_c10d", "_new_process_group_helper", "rendezvous"),
    Seam("torch.distributed.distributed_c10d", "_set_pg_timeout", "rendezvous"),
    Seam("vllm.distributed.parallel_state", "_EPLB", "communicators"),
    Seam("vllm.model_executor.layers.linear", "QKVParallelLinear", "fused"),
    Seam("vllm.model_executor.layers.linear", "UnquantizedLinearMethod.apply", "unquantised"),
    Seam(
        f"{_LAYERS}.attention.mla_attention",
        "MLAAttention.process_weights_after_loading",
        "attention",
    ),
    Seam(
        f"{_LAYERS}.vocab_parallel_embedding", "VocabParallelEmbedding.forward", "shared_vocabulary"
    ),
    Seam(f"{_LAYERS}.vocab_parallel_embedding", "ParallelLMHead.tie_weights", "vocabulary_methods"),
    Seam(f"{_LAYERS}.logits_processor", "LogitsProcessor._apply_head", "vocabulary_methods"),
    Seam(
        "vllm.model_executor.model_loader.dummy_loader",
        "DummyModelLoader.load_weights",
        "slot_methods",
    ),
    Seam(f"{_LAYERS}.fused_moe.routed_experts", "RoutedExperts._get_quant_method", "experts"),
    Seam(
        f"{_LAYERS}.fused_moe.unquantized_fused_moe_method",
        "UnquantizedFusedMoEMethod._init_moe_kernel",
        "expert_methods",
    ),
    Seam(f"{_LAYERS}.fused_moe.oracle.fp8", "make_fp8_moe_kernel", "expert_methods"),
    Seam(
        f"{_LAYERS}.quantization.fp8", "Fp8MoEMethod.get_fused_moe_quant_config", "expert_methods"
    ),
    Seam(f"{_LAYERS}.quantization.fp8", "Fp8MoEMethod._init_moe_kernel", "expert_methods"),
    Seam(f"{_LAYERS}.fused_moe.experts.triton_moe", "TritonExperts.activation", "expert_kernels"),
    Seam(
        f"{_LAYERS}.fused_moe.experts.triton_moe",
        "ops.silu_and_mul_per_block_quant",
        "expert_kernels",
    ),
    Seam(f"{_LAYERS}.fused_moe.experts.cpu_moe", "CPUUnquantizedExperts", "expert_kernels"),
    Seam(f"{_LAYERS}.quantization.mxfp4", "GptOssMxfp4MoEMethod._setup_kernel", "mxfp4_experts"),
    Seam(
        f"{_LAYERS}.quantization.mxfp4",
        "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format",
        "mxfp4_experts",
    ),
    Seam(f"{_LAYERS}.quantization.mxfp4", "make_mxfp4_moe_kernel", "mxfp4_experts"),
    Seam(f"{_LAYERS}.quantization.mxfp4", "GptOssMxfp4MoEMethod.apply_monolithic", "mxfp4_experts"),
    Seam("vllm.model_executor.models.gpt_oss", "GptOssModel._load_weights_mxfp4", "shared_experts"),
    Seam("vllm.model_executor.models.gpt_oss", "GptOssModel._load_weights_other", "shared_experts"),
    Seam(f"{_LAYERS}.quantization.utils.mxfp4_utils", "weight_mx_scale", "mxfp4_experts"),
    Seam("vllm.config.kernel", "KernelConfig.moe_backend", "engine_config"),
    Seam("vllm.model_executor.model_loader", "register_model_loader", "view_loader"),
    Seam(
        "vllm.model_executor.model_loader.weight_utils",
        "initialize_single_dummy_weight",
        "shared_layers",
    ),
    Seam("vllm.forward_context", "get_forward_context", "ulysses"),
    Seam("vllm.forward_context", "override_forward_context", "interludes"),
    Seam("vllm.config.vllm", "_current_vllm_config", "interludes"),
    Seam("vllm.config.vllm", "_current_prefix", "interludes"),
    Seam("vllm.compilation.decorators", "_try_load_aot_compiled_fn", "interludes"),
    Seam("vllm.v1.worker.gpu_worker", "kernel_warmup", "interludes"),
    Seam("vllm.v1.worker.gpu_worker", "freeze_gc_heap", "interludes"),
    Seam("vllm.compilation.compiler_interface", "trigger_inductor_lazy_init", "interludes"),
    Seam("vllm.forward_context", "ForwardContext.cudagraph_runtime_mode", "ulysses"),
    Seam("vllm.forward_context", "ForwardContext.batch_descriptor", "ulysses"),
    Seam("vllm.forward_context", "ForwardContext.is_padding", "ulysses"),
    Seam("vllm.compilation.cuda_graph", "CUDAGraphWrapper.__call__", "piecewise_graphs"),
    Seam(_DISPATCHER, "CudagraphDispatcher.initialize_cudagraph_keys", "capture_sizes"),
    Seam(_DISPATCHER, "CudagraphDispatcher.dispatch", "capture_sizes"),
    Seam(_DISPATCHER, "CudagraphDispatcher._get_lora_cases", "capture_sizes"),
    Seam(_V1_RUNNER, "GPUModelRunner._bookkeeping_sync", "seeded_sampling"),
    Seam(_V1_RUNNER, "GPUModelRunner.take_draft_token_ids", "layout_worker"),
    Seam(_V1_RUNNER, "GPUModelRunner.get_draft_model", "layout_worker"),
    Seam("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.get_draft_model", "layout_worker"),
    Seam("vllm.v1.worker.gpu.spec_decode.utils", "DraftTokensHandler.get_draft_tokens", "drafts"),
    Seam("vllm.utils.cpu_triton_utils", "_expand_kernel_impl", "cpu_speculation"),
    Seam(_V1_RUNNER, "GPUModelRunner.capture_model", "capture_sizes"),
    Seam(_V1_RUNNER, "GPUModelRunner.profile_cudagraph_memory", "capture_sizes"),
    Seam("vllm.v1.worker.gpu.buffer_utils", "StagedWriteTensor.clear_staged_writes", "token_table"),
    Seam("vllm.v1.worker.gpu.buffer_utils", "StagedWriteTensor.stage_write_elem", "seats"),
    Seam("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.add_requests", "seats"),
    Seam("vllm.v1.worker.gpu.model_runner", "GPUModelRunner._remove_request", "seats"),
    Seam("vllm.v1.worker.gpu.model_runner", "PPHandler", "told_tokens"),
    Seam(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.update_pp_decode_requests",
        "told_tokens",
    ),
    Seam("vllm.v1.worker.gpu.sample.penalties", "use_penalty", "beginnings"),
    Seam(_V2_GRAPHS, "BatchExecutionDescriptor", "capture_sizes"),
    Seam(_V2_GRAPHS, "ModelCudaGraphManager.capture", "capture_sizes"),
    Seam(_V2_GRAPHS, "CudaGraphManager.dispatch", "streamed_graphs"),
    Seam(f"{_LAYERS}.attention_layer_base", "AttentionLayerBase.is_draft_layer", "ulysses"),
    Seam("vllm.model_executor.models.interfaces", "EagleModelMixin", "ulysses"),
    Seam(_ATTENTION, "unified_kv_cache_update", "ulysses"),
    Seam(_ATTENTION, "unified_attention_with_output", "ulysses"),
    Seam(f"{_LAYERS}.quantization.base_config", "resolve_quant_method", "shard_rule"),
    Seam(f"{_LAYERS}.quantization.fp8", "Fp8LinearMethod.apply", "fp8_methods"),
    Seam(
        f"{_LAYERS}.quantization.compressed_tensors.schemes",
        "CompressedTensorsW8A8Fp8.apply_weights",
        "fp8_methods",
    ),
    Seam(
        f"{_SCALED_MM}.ScaledMMLinearKernel", "FP8ScaledMMLinearKernel.apply_weights", "fp8_methods"
    ),
    Seam(
        f"{_SCALED_MM}.BlockScaledMMLinearKernel",
        "Fp8BlockScaledMMLinearKernel.apply_weights",
        "fp8_methods",
    ),
    Seam("vllm._custom_ops", "cutlass_scaled_mm", "library_gemms"),
    Seam(
        f"{_LAYERS}.quantization.utils.w8a8_utils",
        "CUTLASS_BLOCK_FP8_SUPPORTED",
        "library_gemms",
    ),
    Seam(
        f"{_LAYERS}.quantization.utils.fp8_utils",
        "get_w8a8_block_fp8_configs",
        "library_gemms",
    ),
    Seam(
        "vllm.v1.structured_output.request",
        "StructuredOutputRequest.is_grammar_ready",
        "vllm_core",
    ),
    Seam("vllm.v1.metrics.loggers", "StatLoggerManager.record", "checked_llm"),
    Seam("vllm.envs", "enable_envs_cache", "frontend"),
    Seam("vllm.entrypoints.launchers.api_server.app_state", "init_app_state", "vllm_app"),
    Seam("vllm.v1.engine.core_client", "AsyncMPClient.add_request_async", "engine_client"),
    Seam("vllm.v1.engine.core_client", "AsyncMPClient.get_output_async", "engine_client"),
    Seam("vllm.v1.engine.core_client", "AsyncMPClient.abort_requests_async", "engine_client"),
    Seam("vllm.v1.engine.core_client", "AsyncMPClient._send_input", "engine_client"),
    Seam("vllm.v1.engine.output_processor", "OutputProcessor.process_outputs", "engine_client"),
    Seam("vllm.v1.engine.output_processor", "OutputProcessor.abort_requests", "engine_client"),
    Seam("vllm.v1.serial_utils", "MsgpackDecoder.decode", "bad_outputs"),
    Seam("vllm.v1.engine.output_processor", "OutputProcessor.do_tracing", "engine_client"),
    Seam("vllm.v1.engine.detokenizer", "FastIncrementalDetokenizer", "decode_streams"),
)


def missing_seams() -> list[Seam]:
    """Return the seams that the installed vLLM lacks."""
    return [seam for seam in SEAMS if not _present(seam)]


def _present(seam: Seam) -> bool:
    try:
        target: object = importlib.import_module(seam.module)
        for name in seam.attribute.split("."):
            target = getattr(target, name)
    except (ImportError, AttributeError):
        return False
    return True


def check_seams() -> None:
    """Check the installed vLLM.

    Raises:
        UnsupportedVllm: it is another version, or lacks a seam.
    """
    import vllm

    if vllm.__version__.split("+")[0] != VLLM_VERSION:
        raise UnsupportedVllm(f"Shoal needs vLLM {VLLM_VERSION}, found {vllm.__version__}")
    if missing := missing_seams():
        names = ", ".join(f"{seam.module}.{seam.attribute}" for seam in missing)
        raise UnsupportedVllm(f"vLLM {vllm.__version__} lacks {names}")
