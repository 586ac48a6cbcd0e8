"""Requests with images go from core to core, and runners have what their encoder is to read."""

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.scheduler.vllm_core import VllmCore
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.scheduler.toy_engines import Make, ToyEngines

# vLLM's decoder makes tensors of what a message holds.
pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")

LENGTH = 12
"""Tokens of an image."""
SPACE = 2 * LENGTH
"""Tokens of images that a unit's encoder keeps."""
(PROMPT,) = random_prompts((80,), seed=9)


def image(seed: int, offset: int) -> MultiModalFeatureSpec:
    pixels = MultiModalFieldElem(
        torch.full((600,), float(seed)), MultiModalSharedField(batch_size=1)
    )
    return MultiModalFeatureSpec(
        MultiModalKwargsItem({"pixels": pixels}),
        "image",
        f"image {seed}",
        PlaceholderRange(offset, LENGTH),
        f"image {seed}",
    )


IMAGES = [image(1, 10), image(2, 30), image(3, 60)]


@pytest.fixture
def engines(make: Make) -> ToyEngines:
    return seeing(make())


def seeing(engines: ToyEngines) -> ToyEngines:
    """Give each core an encoder, as vLLM's scheduler has one of a model that takes images."""
    for core in engines.cores.values():
        core._scheduler.max_num_encoder_input_tokens = SPACE
        core._scheduler.encoder_cache_manager = EncoderCacheManager(SPACE)
    return engines


def generated(
    engines: ToyEngines, core: VllmCore, images: list[MultiModalFeatureSpec]
) -> list[int]:
    request = engines.submit(core, f"r{len(engines.tokens)}", PROMPT, images=images)
    engines.finish(core)
    return engines.tokens[request]


@pytest.fixture
def expected(make: Make) -> list[int]:
    engines = seeing(make())
    return generated(engines, engines.own[0], IMAGES)


def test_another_image_with_the_same_tokens_gives_other_tokens(
    engines: ToyEngines, expected: list[int]
) -> None:
    others = [*IMAGES[:2], image(4, 60)]
    assert generated(engines, engines.own[0], IMAGES) == expected
    assert generated(engines, engines.own[0], others) != expected
    assert generated(engines, engines.own[0], IMAGES) == expected


@pytest.mark.parametrize("steps", range(1, 8))
def test_a_request_is_carried_wherever_its_steps_have_ended(
    engines: ToyEngines, expected: list[int], steps: int
) -> None:
    """A step has 16 tokens, so that some end inside an image."""
    first, second = engines.own
    request = engines.submit(first, "r", PROMPT, images=IMAGES)
    for _ in range(steps):
        first.dispatch()
        engines.step(first, 0)
    exported, _ = engines.carry(first, second, [request])
    covered = exported[0].computed
    engines.finish(second)
    assert engines.tokens[request] == expected
    runners = engines.runners[second.unit]
    assert runners.encoder_runs == sum(
        each.mm_position.offset + LENGTH > covered for each in IMAGES
    )
    carry = next(sent for sent in runners.sent if isinstance(sent, instructions.Carry))
    for told in carry.requests[0].features:
        assert (told.data is None) == (told.mm_position.offset + LENGTH <= covered)


def test_an_image_is_encoded_again_if_its_kv_is_lost_after_a_carry(
    engines: ToyEngines, expected: list[int]
) -> None:
    first, second = engines.own
    request = engines.submit(first, "r", PROMPT, images=IMAGES)
    engines.step(first, 8)
    assert engines.tokens[request]
    engines.carry(first, second, [request])
    engines.step(second, 2)
    assert engines.runners[second.unit].encoder_runs == 0
    assert second.vacate(0, moves=False) == 1
    second.evict_prefix_cache()
    engines.finish(second)
    assert engines.tokens[request] == expected
    assert engines.runners[second.unit].encoder_runs == len(IMAGES)


def test_runners_keep_no_more_than_the_scheduler_counts(engines: ToyEngines) -> None:
    core = engines.own[0]
    for seed in range(10, 22, 3):
        generated(engines, core, [image(seed + k, 10 + 25 * k) for k in range(3)])
        kept = engines.runners[core.unit].encoded
        assert len(kept) * LENGTH <= SPACE
        assert kept.keys() == core._scheduler.encoder_cache_manager.cached.keys()
