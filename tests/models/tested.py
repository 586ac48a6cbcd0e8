"""Which architectures have tests that compare tokens, found in what the tests are run on."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.models.families import FAMILIES
from tests.models.image_families import IMAGE_FAMILIES
from tests.random_checkpoint import Architecture
from tests.runtime.engine import test_real_windows
from tests.runtime.engine.prompts import MODELS, MODELS_WITH_EXPERTS

NOTES = {Architecture.LLAMA4.class_name: ", without chunks of attention"}
"""What real models have and the tests' do not."""


class TokenTest(NamedTuple):
    """A file of tests with real engines in fp32, and what it holds against stock vLLM's tokens."""

    file: str
    modes: str


def token_tests() -> Mapping[str, TokenTest]:
    """Return by architecture the tests of its tokens."""
    found: dict[str, TokenTest] = {}

    def add(test: TokenTest, architectures: Iterable[str]) -> None:
        for architecture in architectures:
            note = NOTES.get(architecture, "")
            found.setdefault(architecture, test._replace(modes=test.modes + note))

    add(
        TokenTest("tests/runtime/engine/test_real_tokens.py", "DP, TP2, TP4, SP, carry"),
        (spec.architecture.class_name for spec in MODELS.values()),
    )
    add(
        TokenTest("tests/runtime/engine/test_real_experts.py", "DP, TP2, SP, carry"),
        (spec.architecture.class_name for spec in MODELS_WITH_EXPERTS.values()),
    )
    add(
        TokenTest("tests/runtime/engine/test_real_latent.py", "DP, TP2, carry"),
        [Architecture.DEEPSEEK_V2.class_name],
    )
    for config, options in test_real_windows.MODELS.values():
        modes = "DP, TP2, SP, carry" if options.get("max_sp", 1) > 1 else "DP, TP2, carry"
        add(
            TokenTest("tests/runtime/engine/test_real_windows.py", modes),
            config["architectures"],
        )
    add(
        TokenTest("tests/runtime/engine/test_real_families.py", "DP, TP2, SP, carry"),
        (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.kind] for family in FAMILIES.values()),
    )
    return found


def image_architectures() -> list[str]:
    """Return the architectures whose tokens are compared for prompts with images."""
    kinds = (family.kind for family in IMAGE_FAMILIES.values())
    return [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind] for kind in kinds]
