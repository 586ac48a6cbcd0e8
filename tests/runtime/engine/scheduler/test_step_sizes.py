"""Steps in which requests decode compute less of prompts, by vLLM's own schedulers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.runtime.config import LayoutConfigs
from shoal.runtime.engine.scheduler.vllm_core import VllmCore
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.real_node import configs_of
from tests.runtime.engine.scheduler.toy_engines import ToyEngines, undisturbed

MOST, LIMIT = 64, 16
SHORT, LONG = random_prompts((5, 150), seed=3)
DRAFTS = 3
NGRAMS = {"method": "ngram", "num_speculative_tokens": DRAFTS}


@pytest.fixture(scope="module")
def configs(llama: Path) -> LayoutConfigs:
    return configs_of(str(llama), 2, max_num_batched_tokens=MOST)


@pytest.fixture
def engines(configs: LayoutConfigs) -> ToyEngines:
    return ToyEngines(configs, asynchronous=False)


def steps(engines: ToyEngines, core: VllmCore) -> Iterator[tuple[int, int]]:
    """Run the steps of a core; yield how many requests decode in each, and its prompt tokens."""
    while core.num_requests:
        assert core.dispatch()
        assert core.oldest_step is not None
        work = core.oldest_step[1]
        yield work.decodes, work.prefill_tokens
        engines.step(core)


def begin(engines: ToyEngines, limit: int) -> VllmCore:
    """Let a request decode, and another one come with a long prompt."""
    core = engines.own[0]
    core.sizes.bound(limit)
    engines.submit(core, "short", SHORT, max_tokens=30)
    engines.step(core)
    engines.submit(core, "long", LONG, max_tokens=2)
    return core


def test_beside_a_request_that_decodes_a_step_computes_less_of_a_prompt(
    engines: ToyEngines,
) -> None:
    found = list(steps(engines, begin(engines, LIMIT)))
    mixed = [prompt for decodes, prompt in found if decodes and prompt]
    assert mixed[:-1] == [LIMIT] * (len(LONG) // LIMIT)
    assert sum(mixed) == len(LONG)
    assert all(decodes for decodes, prompt in found if prompt), "the other one always decodes"


def test_without_a_limit_it_computes_as_much_as_in_any_step(engines: ToyEngines) -> None:
    mixed = [prompt for _, prompt in steps(engines, begin(engines, 0)) if prompt]
    assert mixed == [MOST - 1, MOST - 1, len(LONG) - 2 * (MOST - 1)]


def test_where_nothing_decodes_so_it_does_with_a_limit(engines: ToyEngines) -> None:
    core = engines.own[0]
    core.sizes.bound(LIMIT)
    engines.submit(core, "long", LONG, max_tokens=2)
    found = [prompt for _, prompt in steps(engines, core) if prompt]
    assert found == [MOST, MOST, len(LONG) - 2 * MOST]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tokens_are_the_same(configs: LayoutConfigs, asynchronous: bool) -> None:
    expected = [undisturbed(lambda: ToyEngines(configs), prompt) for prompt in (SHORT, LONG)]
    engines = ToyEngines(configs, asynchronous=asynchronous)
    core = engines.own[0]
    core.sizes.bound(LIMIT)
    engines.submit(core, "short", SHORT)
    engines.step(core, 3)
    engines.submit(core, "long", LONG)
    engines.finish(core)
    assert [engines.tokens[name] for name in ("short", "long")] == expected


def test_drafts_that_are_checked_take_nothing_from_prompts(llama: Path) -> None:
    speculating = configs_of(str(llama), 2, max_num_batched_tokens=MOST, speculative_config=NGRAMS)
    foreseen = {tuple(SHORT): [7] * 40}
    engines = ToyEngines(speculating, asynchronous=False, foreseen=foreseen)
    found = list(steps(engines, begin(engines, LIMIT)))
    assert max(prompt for decodes, prompt in found if decodes) >= LIMIT


@pytest.mark.parametrize(
    ("option", "value"), [("enable_chunked_prefill", False), ("disable_chunked_mm_input", True)]
)
def test_prompts_that_cannot_be_divided_are_left_alone(
    engines: ToyEngines, option: str, value: bool
) -> None:
    """With a limit they would wait until nothing decodes."""
    core = engines.own[0]
    setattr(core.engine_core.scheduler.scheduler_config, option, value)
    core.sizes.bound(LIMIT)
    assert core.sizes.limit == 0
