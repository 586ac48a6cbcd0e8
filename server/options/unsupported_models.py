"""Recognises models that Shoal does not serve, before an engine starts.

The checks use vLLM's configuration, and so the model's ``config.json`` and the options.
``runtime.served_weights`` says which layers and quantisations are served. Engines check the rest
when they load, such as which kernel multiplies a layer's weights.
"""

from typing import Any

from shoal.runtime.served_kv import KV_TYPES
from shoal.runtime.served_weights import (
    EXPERTS_BACKEND,
    FP8_QUANTISATIONS,
    MXFP4_BACKENDS,
    MXFP4_QUANTISATIONS,
    REPACKED_QUANTISATIONS,
    WITHOUT_RULE,
    LayerKind,
    is_fp8_scheme,
    is_integer_scheme,
    schemes,
)
from shoal.server.errors import UserError
from shoal.server.options.sharing_options import LOADED_BY_NAME

SERVED_QUANTISATIONS = FP8_QUANTISATIONS | MXFP4_QUANTISATIONS | REPACKED_QUANTISATIONS
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
    latent = model.use_mla
    kinds = {
        "a pooling model": model.runner_type != "generate",
        "an encoder-decoder model": model.is_encoder_decoder,
        "a mixture-of-experts model": model.is_moe and LayerKind.EXPERTS in WITHOUT_RULE,
        "a model with state-space layers": state_space and LayerKind.STATE_SPACE in WITHOUT_RULE,
        "a model with latent attention (MLA) of a sparse kind": latent and _reads_sparsely(model),
        f"a model with latent attention (MLA), quantised ({model.quantization})": (
            latent and model.quantization is not None
        ),
        f"quantised ({model.quantization})": (
            model.quantization is not None and model.quantization not in SERVED_QUANTISATIONS
        ),
    }
    for kind, applies in kinds.items():
        if applies:
            raise UserError(f"{model.model} is {kind}: not supported")


def _reads_sparsely(model: Any) -> bool:
    """Return whether a token attends to a choice of tokens, as in DeepSeek-V3.2 and V4."""
    return any(hasattr(model.hf_text_config, name) for name in ("index_topk", "compress_ratios"))


def check_experts(config: Any) -> None:
    """Refuse a choice of vLLM's kernel for experts that cannot read them in every layout.

    Args:
        config: vLLM's ``VllmConfig``.

    Raises:
        UserError: the model has experts, and another kernel was asked for.
    """
    backend, model = config.kernel_config.moe_backend, config.model_config
    served = MXFP4_BACKENDS if model.quantization in MXFP4_QUANTISATIONS else (EXPERTS_BACKEND,)
    if model.is_moe and backend not in ("auto", *served):
        raise UserError(
            f"--moe-backend {backend}: not supported; experts of all layouts are one set of "
            f"weights, which only {' or '.join(served)} reads in place"
        )


def check_kv_type(config: Any) -> None:
    """Refuse a type of the KV cache that requests could not take to other layouts.

    Args:
        config: vLLM's ``VllmConfig``.

    Raises:
        UserError: a user, or the checkpoint, has chosen such a type; the message names it.
    """
    chosen = config.cache_config.cache_dtype
    if chosen not in KV_TYPES:
        raise UserError(
            f"--kv-cache-dtype {chosen}: not supported; requests take their KV to other layouts, "
            f"which need it as {', '.join(KV_TYPES[:-1])} or {KV_TYPES[-1]}"
        )


def check_adapted_model(config: Any) -> None:
    """Refuse LoRA adapters of models for which no test has shown that layouts agree.

    Args:
        config: vLLM's ``VllmConfig``.

    Raises:
        UserError: adapters are enabled, and the model is such a model; the message says why.
    """
    model = config.model_config
    if model.use_mla and config.lora_config is not None:
        raise UserError(
            f"--enable-lora: not supported for {model.model}: it has latent attention (MLA)"
        )


def check_kv_groups(config: Any) -> None:
    """Refuse a model some of whose layers attend to chunks, and others not.

    vLLM's ``kv_cache_utils.get_kv_cache_groups`` puts layers that keep different tokens into groups
    of KV blocks of their own. Shoal serves groups of all tokens and of windows side by side. What
    layers keep is certain only once they are made. This check reads the configuration as vLLM's
    models do; engines check the result (``kv_groups.check_kv_groups``).

    Args:
        config: vLLM's ``VllmConfig``.

    Raises:
        UserError: the model has such layers, and vLLM would keep them apart.
    """
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        return
    model = config.model_config
    text = model.hf_text_config
    chunk = getattr(text, "attention_chunk_size", None)
    kinds = set(getattr(text, "layer_types", None) or ())
    if chunk and len(kinds) > 1 and "chunked_attention" in kinds:
        raise UserError(
            f"{model.model} is a model in which only some layers attend to chunks of {chunk} "
            f"tokens: not supported; with {ONE_KV_GROUP} it is"
        )


def check_repacked(config: Any, max_group: int, max_sp: int, max_pp: int, share: int = 1) -> None:
    """Refuse what a model does not go with if each layout loads its own shard of it.

    Args:
        config: vLLM's ``VllmConfig``.
        max_group: most engines of a group.
        max_sp: largest degree of SP.
        max_pp: most stages of a group.
        share: how many engines share weights.

    Raises:
        UserError: vLLM repacks the model's weights, and a group would have stages, or members whose
            heads are in another order than their ranks (``head_order.head_shard``), or the
            checkpoint could not be read again, or engines would share weights.
    """
    model, load_format = config.model_config, config.load_config.load_format
    if not repacks(config):
        return
    problems = {
        f"--max-pp {max_pp}": max_pp > 1,
        f"--max-sp {max_sp} with groups of {max_group}": 1 < max_sp < max_group,
        f"--load-format {load_format}": load_format not in LOADED_BY_NAME,
        f"--share-weights {share}": share > 1,
    }
    for problem, holds in problems.items():
        if holds:
            raise UserError(
                f"{problem}: not supported for {model.model}, which is quantised "
                f"({model.quantization}), so that each layout loads a shard of its own"
            )


def check_stages(max_pp: int, config: Any) -> None:
    """Refuse pipelines of a model whose layers cannot be divided into stages alike.

    Args:
        max_pp: most stages of a group.
        config: vLLM's ``VllmConfig``.

    Raises:
        UserError: the model has no stages in vLLM, or latent attention, with which no test has run
            stages; their number does not divide its layers; or vLLM would keep several groups of
            KV blocks, which engines check again.
    """
    if max_pp == 1:
        return
    model = config.model_config
    if not model.is_pp_supported:
        raise UserError(f"--max-pp {max_pp}: vLLM runs {model.architecture} in one stage only")
    if model.use_mla:
        raise UserError(f"--max-pp {max_pp}: {model.model} has latent attention (MLA)")
    layers = model.get_total_num_hidden_layers()
    if layers % max_pp:
        raise UserError(
            f"--max-pp {max_pp}: the model's {layers} layers make no {max_pp} equal stages"
        )
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    if len(kinds) > 1 and not config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise UserError(
            f"--max-pp {max_pp}: only some layers of {model.model} attend to all tokens, and no "
            f"pipeline serves such a model; with {ONE_KV_GROUP} one may"
        )


def check_quantisation(config: Any) -> None:
    """Refuse weights whose quantisation only the layers' own schemes tell.

    A compressed-tensors checkpoint may have FP8 weights and activations, and integers. What vLLM
    repacks goes with dense models alone.

    Args:
        config: vLLM's ``VllmConfig``.

    Raises:
        UserError: a group of layers is quantised in another way, or the model has experts that vLLM
            repacks; the message says how.
    """
    model = config.model_config
    for target, scheme in schemes(config.quant_config).items():
        weights, activations = scheme["weights"], scheme["input_activations"]
        served = is_fp8_scheme(weights, activations) or is_integer_scheme(weights, activations)
        if not served:
            raise UserError(
                f"{model.model} is quantised (compressed-tensors: {target} has {_words(weights)} "
                f"weights and {_words(activations)} activations): not supported"
            )
    if model.is_moe and repacks(config):
        raise UserError(
            f"{model.model} is a mixture-of-experts model, quantised ({model.quantization}) in a "
            "form that vLLM repacks: not supported"
        )


def repacks(config: Any) -> bool:
    """Return whether vLLM repacks weights of a model, so that each layout loads its own shard.

    Args:
        config: vLLM's ``VllmConfig``.
    """
    return config.model_config.quantization in REPACKED_QUANTISATIONS or any(
        is_integer_scheme(scheme["weights"], scheme["input_activations"])
        for scheme in schemes(config.quant_config).values()
    )


def _words(quantised: Any) -> str:
    """Describe compressed-tensors' ``QuantizationArgs`` in short."""
    if quantised is None:
        return "plain"
    return f"{quantised.num_bits}-bit {quantised.type} ({quantised.strategy})"
