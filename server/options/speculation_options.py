"""Speculative decoding: which of vLLM's methods are served, for which models, and beside what."""

from argparse import Namespace
from typing import Any

from shoal.server.errors import UserError

NGRAM, NGRAM_ON_DEVICE = "ngram", "ngram_gpu"
"""vLLM's names of two methods that propose what followed the request's last tokens where they stood
before, in its prompt or output. They have no weights and no KV of their own. With the second one,
vLLM schedules steps ahead."""
EAGLE, EAGLE_3 = "eagle", "eagle3"
"""vLLM's names of two methods with a draft model, which reads hidden states of the model."""
METHODS = (NGRAM, NGRAM_ON_DEVICE, EAGLE, EAGLE_3)
DRAFT_ARCHITECTURES = frozenset(
    {"EagleLlamaForCausalLM", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"}
)
"""VLLM's names of draft models whose classes tests have run in all layouts.

The last two are one class, for which published checkpoints have either name.
"""
DRAFT_MODEL_OPTIONS = frozenset(
    {"method", "model", "revision", "code_revision", "num_speculative_tokens"}
)
"""What a user may say of a draft model. The layouts decide how members share it."""


def check_speculation_options(args: Namespace) -> None:
    """Refuse methods and options that are not served, before vLLM looks for a draft model.

    Raises:
        UserError: the method, or an option of it, is such a one, or no method is named.
    """
    asked = args.speculative_config
    if asked is None:
        return
    method = asked.get("method")
    if method not in METHODS:
        named = "without a method" if method is None else f"method {method}"
        served = ", ".join(f'"{name}"' for name in METHODS)
        raise UserError(f'--speculative-config: {named}: not supported; "method": {served} are')
    if method in (NGRAM, NGRAM_ON_DEVICE):
        return
    if not asked.get("model"):
        raise UserError(f'--speculative-config: method {method} needs "model", its draft model')
    if others := sorted(asked.keys() - DRAFT_MODEL_OPTIONS):
        raise UserError(f"--speculative-config: {others[0]}: not supported with method {method}")


def check_speculation(config: Any) -> None:
    """Refuse speculation for models whose kind of attention no test has run with it.

    Args:
        config: vLLM's ``VllmConfig``.

    Raises:
        UserError: the model is such a one, or brings another method with it, or the method needs
            vLLM's other model runner, or another draft model; the message says why.
    """
    speculation, model = config.speculative_config, config.model_config
    if speculation is None:
        return
    method = speculation.method
    if method not in METHODS:  # some checkpoints bring it with them
        raise UserError(f"{model.model}: speculative decoding by {method} is not supported")
    most = config.cache_config.block_size - 1
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    problems = {
        f'method {method} needs vLLM\'s V2 model runner, and here vLLM uses V1; "method": '
        f'"{NGRAM}" is served with both': method != NGRAM and not config.use_v2_model_runner,
        f"num_speculative_tokens is at most {most} here, as a block of KV has {most + 1} tokens": (
            speculation.num_speculative_tokens > most
        ),
        "num_speculative_tokens_per_batch_size is not supported": (
            speculation.num_speculative_tokens_per_batch_size is not None
        ),
        f"not supported for {model.model}: it has latent attention (MLA)": model.use_mla,
        f"not supported for {model.model}: only some of its layers attend to all tokens": (
            len(kinds) > 1
        ),
    }
    if method in (EAGLE, EAGLE_3):
        problems |= _problems_of_draft(speculation.draft_model_config, model, method)
    for problem, holds in problems.items():
        if holds:
            raise UserError(f"--speculative-config: {problem}")


def _problems_of_draft(draft: Any, model: Any, method: str) -> dict[str, bool]:
    """Return what can be wrong with a draft model, and whether it is."""
    kv = [(of.get_total_num_kv_heads(), of.get_head_size()) for of in (draft, model)]
    sizes = [f"{heads} KV heads of {size} elements" for heads, size in kv]
    kind = next(iter(draft.architectures), "no known kind")
    return {
        f"{draft.model} is a draft model of kind {kind}: not supported": (
            kind not in DRAFT_ARCHITECTURES
        ),
        f"{draft.model} is quantised ({draft.quantization}): not supported": (
            draft.quantization is not None
        ),
        f"method {method} is not supported for {model.model}, which is quantised "
        f"({model.quantization})": model.quantization is not None,
        f"method {method} is not supported for {model.model}, which has routed experts": (
            model.is_moe
        ),
        f"{draft.model} has {sizes[0]} and {model.model} {sizes[1]}: they must be the same, "
        "because both have their KV in the same blocks": kv[0] != kv[1],
    }


def check_speculation_and_layouts(args: Namespace, max_group: int) -> None:
    """Refuse what does not go with speculation: stages, shared weights, some SP degrees.

    A draft model has its heads in the order of the members. If groups are wider than the degree of
    SP, their model has them in another order (``head_order``), in which a carry would read the KV
    of all layers.

    Args:
        args: the parsed arguments, with a number as ``max_sp``.
        max_group: largest group of the node.

    Raises:
        UserError: one of these is asked for beside speculation.
    """
    if args.speculative_config is None:
        return
    for flag, value in (("--max-pp", args.max_pp), ("--share-weights", args.share_weights)):
        if value > 1:
            raise UserError(f"{flag} {value}: it must be 1 with --speculative-config")
    method = args.speculative_config.get("method")
    if method in (EAGLE, EAGLE_3) and 1 < args.max_sp < max_group:
        raise UserError(
            f"--max-sp {args.max_sp} with groups of {max_group}: not supported with method "
            f"{method}; use 1 or {max_group}"
        )
