"""Images in prompts: which modalities are served, and what a model that takes images goes without.

vLLM's front end makes the features of an image, which travel with the request. So an engine keeps
nothing of a request's images that another engine could lack.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from shoal.server.errors import UserError

IMAGE = "image"
"""vLLM's name of the one modality that is served."""
REFUSED_MODALITIES = ("video", "audio")


def images_alone(limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's limits of items by modality, so that a prompt has no items but images.

    Args:
        limits: what ``--limit-mm-per-prompt`` says: a number for a modality, or its options.

    Raises:
        UserError: it asks for items of another modality.
    """
    for modality, limit in limits.items():
        count = limit.get("count", 1) if isinstance(limit, Mapping) else limit
        if modality != IMAGE and count:
            raise UserError(f"--limit-mm-per-prompt: {modality} is not supported; images are")
    return {**dict.fromkeys(REFUSED_MODALITIES, 0), **limits}


def check_images_and_layouts(args: Namespace, config: Any) -> None:
    """Refuse what no test has run with images.

    SP is refused as it divides a step's tokens, and not what the encoder made of images; pipelines
    as only their first stage has an encoder.

    Args:
        args: the parsed arguments; ``max_sp`` is chosen.
        config: vLLM's ``VllmConfig``.

    Raises:
        UserError: the model takes images, and one of these is asked for; the message says how to do
            without images.
    """
    model = config.model_config
    if not model.supports_multimodal_inputs:
        return
    problems = {
        f"--max-sp {args.max_sp}": args.max_sp > 1,
        f"--max-pp {args.max_pp}": args.max_pp > 1,
        f"--share-weights {args.share_weights}": args.share_weights > 1,
        "--enable-lora": args.enable_lora,
        "--speculative-config": config.speculative_config is not None,
        f"{model.model} is quantised ({model.quantization})": model.quantization is not None,
        f"{model.model} is a mixture-of-experts model": model.is_moe,
    }
    for problem, holds in problems.items():
        if holds:
            raise UserError(
                f"{problem}: not supported with images; --language-model-only serves the text alone"
            )
