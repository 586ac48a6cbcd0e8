"""Pipelines with the V2 model runner on CPUs, by Triton's interpreter; see ``v2_program``.

Run as ``python -m tests.runtime.engine.v2_pipeline_main DIRECTORY ENGINES OPERATIONS``. Two or four
engines write to standard output, as JSON, what DP and each kind of pipeline generate for the same
prompts, which steps the stages ran, and what became of requests that were carried or aborted. Four
engines lead a random life of so many operations then (``random_life``).
"""

import itertools
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.partition import Partition, singles
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages.views import SwitchView
from tests.random_checkpoint import CheckpointSpec, write_checkpoint
from tests.runtime.engine import probes, random_life, real_node, v2_program
from tests.runtime.engine.prompts import SHARED, random_prompts
from tests.runtime.engine.scripted_shift import Script
from tests.runtime.engine.test_real_carry import further
from tests.runtime.engine.v2_main import PATIENCE_SECONDS, SAMPLED, V2
from tests.units import pp, tp, tp_units

TOKENS = 12
PROMPTS = [*random_prompts((5, 33, 150), seed=3), SHARED[0][:90]]
"""With 64 tokens a step, two are computed in chunks."""
PAIR = pp(0, 1)


class Case(NamedTuple):
    """What so many engines do."""

    layers: int
    """Of their model."""
    pipelines: tuple[Unit, ...]
    path: tuple[Partition, ...]
    """Where requests are carried from engine 0."""
    carried_tokens: int
    """Of these requests: so many that few end before their last carry."""


BOTH, FOUR = pp(0, 1, 2, 3, stages=2), pp(0, 1, 2, 3)
CASES = {
    2: Case(2, (PAIR,), ((PAIR,), (tp(0, 1),), (), (PAIR,)), 48),
    4: Case(
        4,
        (PAIR, BOTH, FOUR),
        ((FOUR,), (tp(0, 1, 2, 3),), (), (BOTH,), (PAIR, tp(2, 3)), (FOUR,)),
        64,
    ),
}
PARTITIONS: tuple[Partition, ...] = (
    singles(4),
    tp_units(4, 2),
    (PAIR, pp(2, 3)),
    (FOUR,),
    (BOTH,),
    (alone(0), alone(1), pp(2, 3)),
)
"""Those of the random life."""


def in_turn(node: real_node.RealNode) -> list[list[int]]:
    """Return what a bound pair generates for the first prompts if each is alone there."""
    return [node.generate(PAIR, [prompt], TOKENS)[0] for prompt in PROMPTS[:2]]


def steps_apart(node: real_node.RealNode) -> list[bool]:
    """Return for each step of a bound pair whether the next one has other requests.

    Then both stages can be at work. The first and the last quarter are left out.
    """
    node.probe_all(probes.take_steps)
    node.generate(PAIR, random_prompts((60,) * 4, seed=4), TOKENS)
    first, last = node.probe_all(probes.take_steps)[:2]
    assert first == last, "members run the same steps in the same order"
    quarter = len(first) // 4
    decoding = first[quarter:-quarter]
    return [not before & after for before, after in itertools.pairwise(decoding)]


def submit_each(node: real_node.RealNode, engine: int, count: int) -> list[str]:
    """Send an engine the prompts, each with its own sampling."""
    pairs = zip(PROMPTS, SAMPLED, strict=True)
    return [node.submit(alone(engine), [p], count, **kind)[0] for p, kind in pairs]


def through_carries(node: real_node.RealNode, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Carry requests of each kind of sampling along a path; return their tokens, and counts."""
    sampled = {"plain": node.wait(submit_each(node, 1, case.carried_tokens))}
    requests, views = submit_each(node, 0, case.carried_tokens), list[SwitchView]()
    node.wait_for_tokens(requests, 1)
    for units in case.path:
        further(node, requests, 2)
        views.append(node.switch(*units, treatment=m.Treatment.CARRY))
    sampled["carried"] = node.wait(requests)
    node.switch()
    return sampled, {
        "carried": [view.carried for view in views],
        "not carried": [[view.paused, view.moved, view.recomputed] for view in views],
        "ahead": sum(view.precopied_bytes for view in views) > 0,
    }


def with_aborts(node: real_node.RealNode) -> list[list[int]]:
    """Return what a bound pair generates while others are aborted, and what comes after them."""
    requests = node.submit(PAIR, PROMPTS[:2], 2 * TOKENS)
    gone = node.submit(PAIR, PROMPTS[2:], 2 * TOKENS)
    node.wait_for_tokens([*requests, *gone], 3)
    node.abort(gone)
    again = node.generate(PAIR, PROMPTS[2:], TOKENS)
    return [tokens[:TOKENS] for tokens in node.wait(requests)] + again


def formed_anew(node: real_node.RealNode) -> list[list[int]]:
    """Return what a pair generates after one of its members was killed at work."""
    node.switch(PAIR)
    doomed = node.submit(PAIR, PROMPTS, 20 * TOKENS)
    node.wait_for_tokens(doomed, 2)
    node.kill("runner-1")
    dead = node.controller.books.engines.in_state
    node.until(lambda: dead(EngineState.DEAD) == node.dead == {0, 1}, "both to be given up")
    node.bring_back(tp(0, 1), PAIR)
    with node.bound(PAIR):
        return node.generate(PAIR, PROMPTS, TOKENS)


def with_whole_stages(node: real_node.RealNode) -> list[list[int]]:
    """Return a pipeline's tokens while its stages become whole, and when they are shared again."""
    with node.bound(PAIR):
        running = node.submit(PAIR, PROMPTS, TOKENS)
        node.change_memory(2, stages=2)
        found = node.wait(running)
        node.probe_all(probes.take_streamed)
        found += node.generate(PAIR, PROMPTS, TOKENS)
        assert node.probe_all(probes.take_streamed) == [{}, {}], "it streams nothing"
        node.change_memory(2)
    return found


def into_pipelines_and_back(ways: Collection[str]) -> bool:
    """Return whether requests have gone from single engines to a pipeline, and from one back."""
    pairs = [way.split(" to ") for way in ways]
    there = any(source == "dp" and "pp" in target for source, target in pairs)
    return there and any("pp" in source and target == "dp" for source, target in pairs)


def main(directory: Path, engines: int, operations: int) -> dict[str, Any]:
    real_node.PATIENCE_SECONDS = PATIENCE_SECONDS
    case, model = CASES[engines], directory / "model"
    write_checkpoint(model, CheckpointSpec(layers=case.layers, kv_heads=2))
    four = engines == random_life.ENGINES
    two = {"precopy_tokens": 100, "restart_limit": 1, "share_weights": 2}
    further = random_life.NODE if four else two
    sizes = {"patience": PATIENCE_SECONDS, "environment": V2, "max_pp": engines} | further
    with real_node.RealNode(model, engines, **sizes) as node:
        result: dict[str, Any] = {
            "runners": sorted(set(node.probe_all(probes.model_runner_module))),
            "owned": sum(sum(of.values()) for of in node.probe_all(probes.owned_bytes)),
        }
        tokens = {"dp": node.generate_spread(singles(engines), PROMPTS, TOKENS)}
        for unit in case.pipelines:
            name = unit.layout.name
            with node.bound(unit):
                tokens[name] = node.generate(unit, PROMPTS, TOKENS)
                tokens[f"{name} from the prefix cache"] = node.generate(unit, PROMPTS, TOKENS)
        with node.bound(PAIR):
            tokens["each alone"] = in_turn(node)
            tokens["with aborts"] = with_aborts(node)
            result["apart"] = steps_apart(node)
            node.probe_all(probes.tell_wrong_tokens, True)
            result["wrong tokens told"] = in_turn(node)
            node.probe_all(probes.tell_wrong_tokens, False)
        sampled, switches = through_carries(node, case)
        result |= {"tokens": tokens, "sampled": sampled, "switches": switches}
        if not four:
            tokens["whole stages"] = with_whole_stages(node)
        result["problems"] = node.audit()
        if not four:
            tokens["formed anew"] = formed_anew(node)
        else:
            expected = node.generate_spread(singles(engines), random_life.ALL, random_life.TOKENS)
            node.script(Script.RANDOM)
            lived = random_life.live(
                node, expected, operations, partitions=PARTITIONS, enough=into_pipelines_and_back
            )
            result["life"] = msgspec.to_builtins(lived)
    return result


if __name__ == "__main__":
    arguments = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    json.dump(v2_program.run("tests.runtime.engine.v2_pipeline_main", *arguments), sys.stdout)
