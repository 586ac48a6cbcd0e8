"""Prompts with images, as vLLM's front end hands them to an engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL.Image import Image
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.utils import argsort_mm_positions

from shoal.server.options.image_options import images_alone


class Seen(NamedTuple):
    """A prompt whose images have their tokens."""

    tokens: list[int]
    features: list[MultiModalFeatureSpec]


def see(
    model: Path, prompts: Sequence[Sequence[int]], images: Sequence[Sequence[Image]]
) -> list[Seen]:
    """Do to prompts what ``InputProcessor.process_inputs`` does.

    Args:
        model: the checkpoint, whose processor reads the images.
        prompts: tokens, with one token for each image.
        images: those of each prompt.
    """
    args = EngineArgs(str(model), dtype="float32", limit_mm_per_prompt=images_alone({}))
    processor = MULTIMODAL_REGISTRY.create_processor(args.create_model_config())
    found = []
    for prompt, pictures in zip(prompts, images, strict=True):
        items = processor.info.parse_mm_data({"image": list(pictures)})
        made = processor(list(prompt), items)
        features = [
            MultiModalFeatureSpec(
                data=made["mm_kwargs"][modality][index],
                modality=modality,
                identifier=made["mm_hashes"][modality][index],
                mm_position=made["mm_placeholders"][modality][index],
                mm_hash=made["mm_hashes"][modality][index],
            )
            for modality, index in argsort_mm_positions(made["mm_placeholders"])
        ]
        found.append(Seen(made["prompt_token_ids"], features))
    return found
