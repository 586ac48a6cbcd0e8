"""The V2 model runner on CPUs, by Triton's interpreter; see ``v2_program``.

Run as ``python -m tests.runtime.engine.v2_main DIRECTORY OPERATIONS``. Writes to standard output,
as JSON, what stock vLLM and each layout of two engines that share weights generate for the same
prompts, whether the members of their group sample alike, and what became of requests that switches
moved or carried. Then four engines lead a random life of so many operations (``random_life``), and
two more generate with adapters.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import StructuredOutputsParams

from shoal.policies.values.layouts import alone
from shoal.runtime.controller.books import capacity
from shoal.runtime.protocol import messages as m
from tests.runtime.engine import probes, random_life, real_node, v2_program
from tests.runtime.engine.adapters import named, write_adapters
from tests.runtime.engine.prompts import SHARED, random_prompts
from tests.runtime.engine.scripted_shift import Script
from tests.units import pp, tp

PROMPTS = [*random_prompts((5, 33, 70), seed=3), SHARED[0][:90]]
TOKENS = 12
FEW_TOKENS = 6
SAMPLED_TOKENS = 32
"""Of requests that two switches carry: so many that none ends before the second one."""
PATIENCE_SECONDS = 600.0
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
UNITS = [alone(0), alone(1)]
GROUP, PIPELINE = tp(0, 1), pp(0, 1)
LETTERS = StructuredOutputsParams(regex="[a-z]{200}")
LETTERS._backend, LETTERS._backend_was_auto = "xgrammar", True  # what vLLM's front end chooses
FEW = {"allowed_token_ids": list(range(300, 312))}
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 5},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 1.5} | FEW,
    {"structured_outputs": LETTERS},
    {"logprobs": 3, "prompt_logprobs": 2},
]
"""One for each prompt, over greedy."""
OTHERS: list[dict[str, Any]] = [{"temperature": 1.0, "seed": 6}, FEW]
"""For the first two prompts: they must not give the tokens of ``SAMPLED``."""
WAYS = {"dp to tp2", "tp4 to dp"}
"""Ways that requests of the random life go."""


def samples_alike(node: real_node.RealNode) -> bool:
    """Return whether every member has sampled for itself what the leader answers."""
    prompts = PROMPTS[:2]
    outputs = node.generate(GROUP, prompts, 4, temperature=1.0)
    sequences = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    members = [node.probe(engine, probes.sequences) for engine in GROUP.engines]
    return all(
        any(kept[: len(sequence)] == sequence for kept in member)
        for member in members
        for sequence in sequences
    )


def stock(model: Path) -> list[RequestOutput]:
    """Return what stock generates greedily, then as ``SAMPLED`` says, then for a random life."""
    lived: list[dict[str, Any]] = [{}] * len(random_life.ALL)
    sampling = [{}] * len(PROMPTS) + SAMPLED + lived
    common = {"temperature": 0.0, "ignore_eos": True}
    counts = [TOKENS] * len(PROMPTS) + [SAMPLED_TOKENS] * len(SAMPLED)
    counts += [random_life.TOKENS] * len(lived)
    params = [
        SamplingParams(**common | options, max_tokens=count)
        for options, count in zip(sampling, counts, strict=True)
    ]
    prompts = PROMPTS * 2 + random_life.ALL
    return real_node.stock_outputs(model, prompts, params, **V2)


def submit_each(node: real_node.RealNode, sampling: list[dict[str, Any]]) -> list[str]:
    """Send the group the first prompts, each with its own sampling."""
    pairs = zip(PROMPTS, sampling, strict=False)
    return [node.submit(GROUP, [prompt], SAMPLED_TOKENS, **options)[0] for prompt, options in pairs]


def through_switches(node: real_node.RealNode) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Move requests into a group, then carry all of its requests to its members and back.

    Returns:
        The requests, all ended, by what became of them; and what the switches said.
    """
    requests = {"moved": node.submit(None, PROMPTS[2:], 2 * TOKENS)}
    node.wait_for_tokens(requests["moved"], 2)
    sent: list[m.Message] = []
    node.transport.before_send = lambda _engine, message: sent.append(message)
    with patch.object(capacity, "LEASE_BLOCKS", 2):
        moved = node.switch(GROUP, treatment=m.Treatment.SOFT).moved
    requests["sampled"] = submit_each(node, SAMPLED)
    requests["others"] = submit_each(node, OTHERS)
    node.wait_for_tokens(requests["sampled"], 4)
    views = [node.switch(treatment=m.Treatment.CARRY)]
    node.wait_for_tokens(requests["sampled"], 7)
    views.append(node.switch(GROUP, treatment=m.Treatment.CARRY))
    for ids in requests.values():
        node.wait(ids)
    node.switch()
    return requests, {
        "moved": moved,
        "lease grew": any(isinstance(message, m.Grow) for message in sent),
        "carried": [view.carried >= len(SAMPLED) for view in views],
        "not carried": [[view.paused, view.moved, view.recomputed] for view in views],
    }


def difference(node: real_node.RealNode, request: str, expected: RequestOutput) -> float:
    """Return by how much a request's log probabilities differ from stock's at most."""
    assert expected.prompt_logprobs is not None
    told = [*expected.prompt_logprobs[1:], *(expected.outputs[0].logprobs or ())]
    got = [*node.prompt_logprobs[request], *node.logprobs[request]]
    assert [values.keys() for values in got] == [values.keys() for values in told if values]
    return max(
        abs(value - values[token].logprob)
        for by_token, values in zip(got, told, strict=True)
        for token, value in by_token.items()
    )


def live(model: Path, expected: list[list[int]], operations: int) -> random_life.Lived:
    """Let four engines lead a random life."""
    sizes = {"patience": PATIENCE_SECONDS, "environment": V2} | random_life.NODE
    with real_node.RealNode(model, random_life.ENGINES, **sizes) as node:
        node.script(Script.RANDOM)
        return random_life.live(node, expected, operations, enough=WAYS.issubset)


def adapted(model: Path, directory: Path) -> dict[str, Any]:
    """Return what a node's units generate, some by sequence, with two adapters and none."""
    adapters = write_adapters(directory, random_life.SPEC)
    sizes: dict[str, Any] = {"patience": PATIENCE_SECONDS, "environment": V2}
    sizes |= {"max_sp": 2, "max_pp": 2}
    lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    found: dict[str, Any] = {}
    with real_node.RealNode(model, 2, adapters=named(adapters), **sizes, **lora) as node:
        node.script(Script.SP)
        for name, units in (("dp", UNITS), ("pipeline", [PIPELINE]), ("by sequence", [GROUP])):
            node.switch(*units)
            node.probe_all(probes.take_modes)
            requests = [
                node.submit(unit, PROMPTS[:3:2], FEW_TOKENS, adapter=adapter)
                for unit, adapter in zip(itertools.cycle(units), adapters, strict=False)
            ]
            found[name] = [node.wait(each) for each in requests]
        found["modes"] = node.probe_all(probes.take_modes)
    return found


def main(directory: Path, operations: int) -> dict[str, Any]:
    real_node.PATIENCE_SECONDS = PATIENCE_SECONDS
    model = random_life.make_model(directory)
    expected = stock(model)
    both = len(PROMPTS) + len(SAMPLED)
    tokens = {"stock": real_node.tokens_of(expected[: len(PROMPTS)])}
    sampled = {"stock": real_node.tokens_of(expected[len(PROMPTS) : both])}
    sizes = {"patience": PATIENCE_SECONDS, "environment": V2, "max_sp": 2, "share_weights": 2}
    with real_node.RealNode(model, 2, **sizes) as node:
        runners = sorted(set(node.probe_all(probes.model_runner_module)))
        takes_arrays = node.probe_all(probes.takes_arrays)
        tokens["dp"] = node.generate_spread(UNITS, PROMPTS, TOKENS)
        streamed = [node.probe(0, probes.streams)]
        node.change_memory(1)
        tokens["dp with whole weights"] = node.generate_spread(UNITS, PROMPTS, TOKENS)
        streamed.append(node.probe(0, probes.streams))
        node.change_memory(2)
        paused = node.submit(alone(1), PROMPTS, 2 * TOKENS)
        node.wait_for_tokens(paused, 2)
        with node.bound(GROUP):
            tokens["tp2"] = node.generate(GROUP, PROMPTS, TOKENS)
            tokens["tp2 from the prefix cache"] = node.generate(GROUP, PROMPTS, TOKENS)
            owned = node.probe_all(probes.owned_bytes)
        node.probe_all(probes.take_modes)
        node.script(Script.ALTERNATE)
        with node.bound(GROUP):
            tokens["in both modes"] = node.generate(GROUP, PROMPTS, TOKENS)
            node.probe(1, probes.draw)
            alike = [samples_alike(node)]
        with node.bound(GROUP):
            alike.append(samples_alike(node))
        modes = node.probe(1, probes.take_modes)
        tokens["paused dp"] = [output[:TOKENS] for output in node.wait(paused)]
        requests, switches = through_switches(node)
        moved = node.wait(requests["moved"])
        tokens["moved"] = tokens["dp"][:2] + [output[:TOKENS] for output in moved]
        sampled |= {name: node.wait(requests[name]) for name in ("sampled", "others")}
        differ = difference(node, requests["sampled"][-1], expected[both - 1])
        problems = node.audit()
    lived = live(model, real_node.tokens_of(expected[both:]), operations)
    return {
        "tokens": tokens,
        "sampled": sampled,
        "log probabilities differ": differ,
        "switches": switches,
        "runners": runners,
        "takes arrays": takes_arrays,
        "owned": owned,
        "streamed": streamed,
        "modes": sorted(mode for mode, steps in modes.items() if steps),
        "sample alike": dict(zip(("one has drawn", "bound again"), alike, strict=True)),
        "problems": problems,
        "life": msgspec.to_builtins(lived),
        "adapted": adapted(model, directory),
    }


if __name__ == "__main__":
    json.dump(
        v2_program.run("tests.runtime.engine.v2_main", Path(sys.argv[1]), int(sys.argv[2])),
        sys.stdout,
    )
