"""Prompts with images on real engines: every layout generates stock's tokens, through carries too.

Idefics3 has plain positions, PaddleOCR-VL those of M-RoPE. Each of
``tests.models.image_families`` is tested.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from PIL.Image import Image
from vllm.multimodal.inputs import MultiModalFeatureSpec

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.partition import singles
from shoal.runtime.protocol import messages as m
from tests.models.image_families import FIRST, IMAGE_FAMILIES, picture, write_image_family
from tests.runtime.engine import probes
from tests.runtime.engine.every_layout import COMPARED, first
from tests.runtime.engine.image_prompts import Seen, see
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.units import tp
from tests.variety import is_varied

TOKENS = 40
PAIR = tp(0, 1)
NAMES = list(IMAGE_FAMILIES)
Tokens = list[list[int]]


def beside(text: list[int], images: int) -> list[int]:
    """Return a text with so many images after its fifth token."""
    return [*text[:5], *[FIRST] * images, *text[5:]]


SHORT, OTHER, LONG = random_prompts((20, 45, 70), seed=61)
PROMPTS: list[tuple[list[int], list[int]]] = [
    (beside(SHORT, 1), [1]),
    (beside(SHORT, 1), [2]),
    (beside(OTHER, 2), [3, 1]),
    (beside(LONG, 3), [1, 1, 4]),
]
"""Tokens, and the seeds of the images: the first two differ in nothing but the image."""
LARGE: list[tuple[list[int], list[int]]] = [
    (beside(text, 30), list(range(first, first + 30)))
    for text, first in zip(random_prompts((40, 41, 42), seed=62), (100, 130, 160), strict=True)
]
"""Prompts of several steps, some of which end inside an image."""


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / str(request.param)
    write_image_family(path, request.param)
    return path


def pictures(prompts: Sequence[tuple[list[int], list[int]]]) -> list[list[Image]]:
    return [[picture(seed) for seed in seeds] for _, seeds in prompts]


@pytest.fixture(scope="module")
def seen(model: Path) -> list[Seen]:
    """``PROMPTS`` and ``LARGE`` as a front end sends them."""
    both = PROMPTS + LARGE
    return see(model, [tokens for tokens, _ in both], pictures(both))


@pytest.fixture(scope="module")
def expected(model: Path) -> Tokens:
    """What stock vLLM makes of ``PROMPTS`` and ``LARGE``."""
    both = PROMPTS + LARGE
    return stock_tokens(model, [tokens for tokens, _ in both], TOKENS, images=pictures(both))


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    with RealNode(model, 2, restart_limit=3) as node:
        yield node


def submit(
    node: RealNode, unit: Unit | None, seen: Sequence[Seen], tokens: int = TOKENS
) -> list[str]:
    features = [each.features for each in seen]
    return node.submit(unit, [each.tokens for each in seen], tokens, features=features)


def test_tokens_are_stocks_in_every_layout(
    node: RealNode, seen: list[Seen], expected: Tokens
) -> None:
    assert is_varied(expected)
    assert expected[0] != expected[1], "the image would not matter"
    short, several = seen[: len(PROMPTS)], first(expected[: len(PROMPTS)])
    for partition in (singles(2), (PAIR,)):
        node.switch(*partition)
        for _ in range(2):  # the second time from the prefix cache
            for unit in partition:
                assert node.wait(submit(node, unit, short, COMPARED)) == several
    assert node.audit() == []
    assert node.probe_all(probes.owned_bytes) == [{"dp": 0, "tp2": 0}] * 2


def test_features_of_another_image_are_noticed(
    node: RealNode, seen: list[Seen], expected: Tokens
) -> None:
    """They change the tokens where the encoder reads them; the identifier says which they are."""
    node.switch()
    one, second = seen[0], seen[1]

    def generate(features: MultiModalFeatureSpec, identifier: str) -> list[int]:
        named = MultiModalFeatureSpec(
            features.data, "image", identifier, features.mm_position, identifier
        )
        same = Seen(second.tokens, [named])
        (tokens,) = node.wait(submit(node, alone(0), [same], COMPARED))
        return tokens

    of_one, of_second = first(expected[:2])
    assert of_one != of_second
    assert generate(second.features[0], "x") == of_second
    assert generate(one.features[0], "y") == of_one
    assert generate(one.features[0], "x") == of_second, "the cache has that of the name"


def test_carried_requests_go_on_with_the_right_tokens(
    node: RealNode, seen: list[Seen], expected: Tokens
) -> None:
    node.switch()
    requests = submit(node, alone(0), seen[: len(PROMPTS)])
    node.wait_for_tokens(requests, 4)
    for partition, tokens in (((PAIR,), 12), (singles(2), 24)):
        view = node.switch(*partition, treatment=m.Treatment.CARRY)
        assert (view.carried, view.recomputed) == (len(PROMPTS), {})
        node.wait_for_tokens(requests, tokens)
    assert node.wait(requests) == expected[: len(PROMPTS)]
    assert node.audit() == []


def test_prompts_are_carried_in_the_middle_of_an_image(
    node: RealNode, seen: list[Seen], expected: Tokens
) -> None:
    node.switch()
    large, several = seen[len(PROMPTS) :], expected[len(PROMPTS) :]
    requests = submit(node, alone(0), large)
    node.until(
        lambda: node.probe(0, probes.scheduled).get(requests[0], 0) > 64, "a part of a prompt"
    )
    view = node.switch(PAIR, treatment=m.Treatment.CARRY)
    assert (view.carried > 0, view.recomputed) == (True, {})
    assert node.wait(requests) == several
    assert node.audit() == []


def test_requests_of_a_dead_engine_begin_again_with_their_images(
    node: RealNode, seen: list[Seen], expected: Tokens
) -> None:
    node.switch()
    requests = submit(node, None, seen[: len(PROMPTS)])  # the first engine has room for all
    node.wait_for_tokens(requests, 4)
    node.kill("runner-0")
    assert node.wait(requests) == expected[: len(PROMPTS)]
