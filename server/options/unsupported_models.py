"""Recognises models that Shoal does not serve, before an engine starts.

The checks use vLLM's configuration, and so the model's ``config.json`` and the options.
``runtime.served_weights`` says which layers and quantisations are served. Engines check the rest
when they load, such as which kernel multiplies a layer's weights.
"""

from collections.abc import Set
from typing import Any

from shoal.runtime.served_weights import (
    FP8_QUANTISATIONS,
    WITHOUT_RULE,
    LayerKind,
    is_fp8_scheme,
)
from shoal.server.errors import UserError

ONE_KV_GROUP = "--disable-hybrid-kv-cache-manager"
"""vLLM's option to keep the KV of every layer for all tokens, in one group."""


def check_model_config(model: Any) -> None:
    """Refuse kinds of models that Shoal does not support.

    Args:
        model: vLLM's ``ModelConfig``.

    Raises:
        UserError: the model is of such a kind; the message names it.
    """
    state_space = model.is_hybrid or model.is_attention_free
    kinds = {
        "a multimodal model": model.is_multimodal_model,
        "a pooling model": model.runner_type != "generate",
        "an encoder-decoder model": model.is_encoder_decoder,
        "a mixture-of-experts model": model.is_moe and LayerKind.EXPERTS in WITHOUT_RULE,
        "a model with state-space layers": state_space and LayerKind.STATE_SPACE in WITHOUT_RULE,
        "a model with latent attention (MLA)": (
            model.use_mla and LayerKind.LATENT_ATTENTION in WITHOUT_RULE
        ),
        f"quantised ({model.quantization})": model.quantization not in (None, *FP8_QUANTISATIONS),
    }
    for kind, applies in kinds.items():
        if applies:
            raise UserError(f"{model.model} is {kind}: not supported")


def check_kv_groups(config: Any) -> None:
    """Refuse a model whose layers have several groups of KV blocks in vLLM.

    vLLM's ``kv_cache_utils.get_kv_cache_groups`` puts layers that keep different tokens, such as
    those of a sliding window and those of all, into groups of their own. A request then takes
    blocks of every group, but the lease of a group of engines counts the blocks of only one. The
    layers' windows are certain only once the layers are made. This check reads the configuration as
    vLLM's models do; engines check the result (``vllm_core.check_kv_groups``).

    Args:
        config: vLLM's ``VllmConfig``.

    Raises:
        UserError: the model has layers of several kinds, and vLLM would keep them apart.
    """
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        return
    model = config.model_config
    reaches = sorted(_reaches(model.hf_text_config))
    if len(reaches) > 1:
        raise UserError(
            f"{model.model} is a model whose layers reach back differently far "
            f"({', '.join(reaches)}), so vLLM keeps several groups of KV blocks: not supported; "
            f"with {ONE_KV_GROUP} it keeps one"
        )


def _reaches(text: Any) -> Set[str]:
    """Return which tokens the layers attend to, by the ``config.json`` of a model's text part.

    The set is empty if the file says nothing about single layers: then vLLM's models make all
    layers of one kind.
    """
    window = getattr(text, "sliding_window", None)
    windows = getattr(text, "interleaved_sliding_window", None)
    if not isinstance(windows, list | tuple):
        chunk = getattr(text, "attention_chunk_size", None)
        sizes = {"sliding_attention": window, "chunked_attention": chunk or window}
        windows = [sizes.get(kind) for kind in getattr(text, "layer_types", None) or ()]
    return {f"the last {size} tokens" if size else "all tokens" for size in windows}


def check_quantisation(model: str, quantisation: Any) -> None:
    """Refuse a compressed-tensors checkpoint with anything but FP8 weights and FP8 activations.

    Args:
        model: the model's name.
        quantisation: vLLM's ``VllmConfig.quant_config``; None, or of any class.

    Raises:
        UserError: a group of layers is quantised in another way; the message says how.
    """
    if getattr(quantisation, "online_quantization_config", None) is not None:
        return  # It is quantised again as it is loaded.
    for target, scheme in getattr(quantisation, "target_scheme_map", {}).items():
        weights, activations = scheme["weights"], scheme["input_activations"]
        if not is_fp8_scheme(weights, activations):
            raise UserError(
                f"{model} is quantised (compressed-tensors: {target} has {_words(weights)} weights "
                f"and {_words(activations)} activations): not supported"
            )


def _words(quantised: Any) -> str:
    """Describe compressed-tensors' ``QuantizationArgs`` in short."""
    if quantised is None:
        return "plain"
    return f"{quantised.num_bits}-bit {quantised.type} ({quantised.strategy})"
