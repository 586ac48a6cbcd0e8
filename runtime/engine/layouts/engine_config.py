"""The configuration that an engine runs a layout with: vLLM's, and what lets layouts share."""

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.config import LayoutConfigs, NodeConfig
from shoal.runtime.engine.weights.rules.rule_registry import WEIGHT_SCHEME
from shoal.runtime.engine.weights.shared_weights import SharedWeights
from shoal.runtime.engine.weights.view_loader import VIEW_LOAD_FORMAT
from shoal.runtime.layout_configs import take

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
    config.additional_config = {
        **config.additional_config,
        "shoal_weights": f"{WEIGHT_SCHEME},groups={node.max_group}",
    }
    config.quant_config = SharedWeights(views=layout != DP, inner=config.quant_config)
    # A layout that cannot hold the asked length serves what it can (see ``vllm_backend``).
    config.model_config.original_max_model_len = -1
    if current_platform.is_cpu():
        # The platform turns it off because its own executors gain nothing; ours supports it.
        config.scheduler_config.async_scheduling = configs.asynchronous_on_cpu
    if layout != DP:
        config.load_config.load_format = VIEW_LOAD_FORMAT
        # A worker needs its share of the device's memory to be free; DP has taken it for all.
        config.cache_config.gpu_memory_utilization = NO_SHARE
    return config
