"""Speculative decoding: which of vLLM's methods are served, for which models, and beside what."""

from argparse import Namespace
from typing import Any

from shoal.server.errors import UserError

NGRAM, NGRAM_ON_DEVICE = "ngram", "ngram_gpu"
"""vLLM's names of the methods that are served. Both propose what followed the request's last tokens
where they stood before, in its prompt or output, and have no weights and no KV of their own. With
the second one, vLLM schedules steps ahead."""
METHODS = (NGRAM, NGRAM_ON_DEVICE)


def check_speculation_options(args: Namespace) -> None:
    """Refuse other methods than n-grams, before vLLM looks for the model that they need.

    Raises:
        UserError: the method is another one, or not named.
    """
    if args.speculative_config is None:
        return
    method = args.speculative_config.get("method")
    if method not in METHODS:
        named = "without a method" if method is None else f"method {method}"
        served = " and ".join(f'"{name}"' for name in METHODS)
        raise UserError(f'--speculative-config: {named}: not supported; "method": {served} are')


def check_speculation(config: Any) -> None:
    """Refuse speculation for models whose kind of attention no test has run with it.

    Args:
        config: vLLM's ``VllmConfig``.

    Raises:
        UserError: the model is such a one, or brings another method with it, or the method needs
            vLLM's other model runner; the message says why.
    """
    speculation, model = config.speculative_config, config.model_config
    if speculation is None:
        return
    if speculation.method not in METHODS:  # some checkpoints bring it with them
        raise UserError(
            f"{model.model}: speculative decoding by {speculation.method} is not supported"
        )
    most = config.cache_config.block_size - 1
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    problems = {
        f'method {NGRAM_ON_DEVICE} needs vLLM\'s V2 model runner, and here vLLM uses V1; "method": '
        f'"{NGRAM}" is served with both': (
            speculation.method == NGRAM_ON_DEVICE and not config.use_v2_model_runner
        ),
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
    for problem, holds in problems.items():
        if holds:
            raise UserError(f"--speculative-config: {problem}")


def check_speculation_and_layouts(args: Namespace) -> None:
    """Refuse what no test has run with speculation: SP, stages, shared weights, adapters.

    Raises:
        UserError: one of these is asked for beside speculation.
    """
    if args.speculative_config is None:
        return
    for flag, value in (
        ("--max-sp", args.max_sp),
        ("--max-pp", args.max_pp),
        ("--share-weights", args.share_weights),
    ):
        if value > 1:
            raise UserError(f"{flag} {value}: it must be 1 with --speculative-config")
    if args.enable_lora:
        raise UserError("--enable-lora: not supported with --speculative-config")
