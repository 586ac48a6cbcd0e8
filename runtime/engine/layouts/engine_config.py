"""The configuration that an engine runs a layout with: vLLM's, and what lets layouts share."""

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheLayout

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.config import LayoutConfigs, NodeConfig
from shoal.runtime.engine.layouts.adapters import limit_adapters
from shoal.runtime.engine.layouts.cpu_speculation import speculate_on_cpus
from shoal.runtime.engine.layouts.streamed_graphs import can_have_graphs
from shoal.runtime.engine.weights.rules.rule_registry import WEIGHT_SCHEME
from shoal.runtime.engine.weights.rules.unquantised import leave_weights_on_cpus
from shoal.runtime.engine.weights.shared_weights import SharedWeights
from shoal.runtime.engine.weights.sharing.slots import OPERATOR
from shoal.runtime.engine.weights.view_loader import VIEW_LOAD_FORMAT
from shoal.runtime.layout_configs import take
from shoal.runtime.served_weights import EXPERTS_BACKEND, MXFP4_QUANTISATIONS
from shoal.runtime.shared_attention import is_attention_shared
from shoal.runtime.vocabulary_sharing import is_vocabulary_shared

HEAD_MAJOR_ONLY = 10
"""GPUs of this generation (Blackwell) have attention kernels that read head-major pages alone."""
NO_SHARE = 1e-9
"""The least share of a device's memory that vLLM's configuration takes."""


def engine_config(node: NodeConfig, layout: Layout, executor_class: type) -> VllmConfig:
    """Return vLLM's configuration of a layout with what engines add to it.

    Args:
        node: its ``vllm`` has the node's configurations.
        layout: one of the node's.
        executor_class: what carries vLLM's calls to the runners.

    Raises:
        ConfigurationDiffersError: see ``layout_configs.take``.
    """
    configs: LayoutConfigs = node.vllm
    config = take(configs, layout)
    config.parallel_config.distributed_executor_backend = executor_class
    config.load_config.use_tqdm_on_load = False
    shared = f"shared={node.share_weights},heads={shares_attention(node, config)}"
    shared += f",vocabulary={shares_vocabulary(node, config)}"
    config.additional_config = {
        **config.additional_config,
        "shoal_weights": f"{WEIGHT_SCHEME},groups={node.weight_groups},{shared}",
    }
    config.quant_config = SharedWeights(views=layout != DP, inner=config.quant_config)
    limit_adapters(config, node.share_weights)
    # A layout that cannot hold the asked length serves what it can (see ``vllm_backend``).
    config.model_config.original_max_model_len = -1
    if current_platform.is_cpu():
        leave_weights_on_cpus()
        if config.speculative_config is not None:
            speculate_on_cpus()
        # The platform turns it off because its own executors gain nothing; ours supports it.
        config.scheduler_config.async_scheduling = configs.asynchronous_on_cpu and layout.pp == 1
    elif config.model_config.quantization in MXFP4_QUANTISATIONS:
        pass  # its kernels read ranges of what vLLM packs, so vLLM's choice for the GPU is right
    elif config.model_config.is_moe:
        config.kernel_config.moe_backend = EXPERTS_BACKEND
    if layout.tp < node.share_weights:
        _stream_weights(config, layout)
    if node.max_pp > 1:
        config.cache_config.kv_cache_layout = blocks_outermost().name
    if layout != DP:
        config.load_config.load_format = VIEW_LOAD_FORMAT
        # A worker needs its share of the device's memory to be free; DP has taken it for all.
        config.cache_config.gpu_memory_utilization = NO_SHARE
        if config.model_config.multimodal_config is not None:
            # DP has measured the encoder, and what it keeps (``encoder_cache_bytes``).
            config.model_config.multimodal_config.skip_mm_profiling = True
    return config


def shares_attention(node: NodeConfig, config: VllmConfig) -> bool:
    """Return whether engines share the weights of attention's projections."""
    kv_heads = config.model_config.get_total_num_kv_heads()
    return is_attention_shared(kv_heads, node.share_weights, node.max_group, node.max_sp)


def shares_vocabulary(node: NodeConfig, config: VllmConfig) -> bool:
    """Return whether engines share the embeddings and the LM head."""
    model = config.model_config
    # vLLM computes a head in another dtype from the weight itself, past the layer's method.
    is_plain = model.head_dtype == model.dtype
    tied = getattr(model.hf_text_config, "tie_word_embeddings", False)
    return is_plain and is_vocabulary_shared(tied, node.share_weights, node.max_group)


def _stream_weights(config: VllmConfig, layout: Layout) -> None:
    """Divide the model of a layout where it waits for weights; only DP's parts have CUDA graphs.

    The operator that waits for weights has the layer's number. Within a piece that is compiled, it
    would make each layer's piece another one, and Inductor would compile all of them.
    """
    compilation = config.compilation_config
    if layout != DP or not can_have_graphs(config):
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [], 0
    if compilation.splitting_ops:  # else a model is compiled as a whole
        compilation.splitting_ops = [*compilation.splitting_ops, OPERATOR]


def blocks_outermost() -> KVCacheLayout:
    """Return the order of the KV cache of a node with pipelines: a block's layers are adjacent.

    A stage's block holds more tokens of fewer layers. With layers outermost, as vLLM's default has
    them, a stage's block would lie on the bytes of other blocks. The order inside a layer's page is
    the one that the device's attention kernels prefer.
    """
    if current_platform.is_cpu():
        return KVCacheLayout.BLHNC
    capability = current_platform.get_device_capability()
    head_major = capability is not None and capability.major == HEAD_MAJOR_ONLY
    return KVCacheLayout.BLHNC if head_major else KVCacheLayout.BLNHC
