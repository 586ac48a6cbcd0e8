"""Small random checkpoints of models that take images: the towers and projectors of real ones.

Transformers makes the models, and its processors that need no torchvision read the images. The text
parts are those of ``tests.models.families`` and ``tests.random_checkpoint``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

from tests import random_checkpoint as drawn
from tests.models import families
from tests.models.families import SPEC
from tests.random_checkpoint import write_checkpoint

PATCH = 14
SIDE = 8 * PATCH
"""Pixels of an image's sides."""
FIRST = SPEC.vocab_size
"""The first of the tokens that prompts with images have; the vocabulary ends after ``MOST``."""
MOST = 16

TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
}
PIXELS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_convert_rgb": True}


@dataclass(frozen=True)
class ImageFamily:
    """A model: its parts, how its processor is configured, and how prompts name an image."""

    kind: str
    text: Mapping[str, Any]
    tower: Mapping[str, Any]
    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    pixels: Mapping[str, Any]
    tokens: Mapping[str, str]
    """Attributes of the tokenizer, and the tokens from ``FIRST`` on that they name."""


_LONGEST = {"longest_edge": SIDE}

IMAGE_FAMILIES: dict[str, ImageFamily] = {
    "idefics3": ImageFamily(
        kind="idefics3",
        text={"model_type": "llama"},
        tower={"model_type": "idefics3_vision", **TOWER},
        config={"image_token_id": FIRST, "scale_factor": 2, "pad_token_id": 2},
        processor={"processor_class": "Idefics3Processor", "image_seq_len": 16},
        pixels={
            "image_processor_type": "Idefics3ImageProcessor",
            "do_image_splitting": False,
            "size": _LONGEST,
            "max_image_size": _LONGEST,
            **PIXELS,
        },
        tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_tag": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    ),
    "paddleocr_vl": ImageFamily(
        kind="paddleocr_vl",
        text={
            "model_type": "paddleocr_vl_text",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 6, 6],
            },
        },
        tower={"model_type": "paddleocr_vl_vision", **TOWER, "spatial_merge_size": 2},
        config={
            "image_token_id": FIRST,
            "video_token_id": FIRST + 1,
            "vision_start_token_id": FIRST + 2,
            "vision_end_token_id": FIRST + 3,
        },
        processor={"processor_class": "PaddleOCRVLProcessor"},
        pixels={
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "size": {"shortest_edge": SIDE**2, "longest_edge": 2 * SIDE**2},
            "patch_size": PATCH,
            "merge_size": 2,
            **PIXELS,
        },
        tokens={
            "image_token": "<|IMAGE_PLACEHOLDER|>",
            "video_token": "<|video_pad|>",
            "image_start_token": "<|IMAGE_START|>",
            "image_end_token": "<|IMAGE_END|>",
        },
    ),
}


def write_image_family(path: Path, name: str) -> None:
    """Write a checkpoint of a family to directory ``path``; it always gets the same weights."""
    family = IMAGE_FAMILIES[name]
    write_checkpoint(path, SPEC)  # for its tokenizer
    sizes = families.sizes() | {"vocab_size": FIRST + MOST}
    text = {**sizes, **family.text}
    config = AutoConfig.for_model(
        family.kind,
        **{"text_config": text, "vision_config": dict(family.tower), **family.config},
        tie_word_embeddings=False,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(SPEC.seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(families.drawn_like(parameter_name, parameter, draw))
        head = model.get_output_embeddings().weight
        head[: len(drawn.SPECIAL_TOKENS)] = 0
        head[FIRST:] = 0
    model.save_pretrained(path)
    _write_tokenizer(path, family)
    _write(path / "preprocessor_config.json", family.pixels)
    _write(path / "processor_config.json", family.processor)


def _write_tokenizer(path: Path, family: ImageFamily) -> None:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(list(family.tokens.values()))
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    _write(path / "tokenizer_config.json", config | {"extra_special_tokens": dict(family.tokens)})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(content)))


def picture(seed: int, side: int = SIDE) -> Image.Image:
    """Return an image of coloured squares, the same for the same seed."""
    squares = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize((side, side), Image.Resampling.NEAREST)
