"""Speculative decoding with the V2 model runner on CPUs, by Triton's interpreter.

Run as ``python -m tests.runtime.engine.v2_speculation_main DIRECTORY METHOD``, where the method is
one of vLLM's. Writes to standard output, as JSON, what stock vLLM generates without speculation,
what a node of two engines generates with it in each layout and through switches, and how many
drafts were accepted and rejected.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import singles
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.looping_checkpoint import write_looping
from tests.runtime.engine import n_grams, probes, real_node, v2_program
from tests.runtime.engine.modes import scripted
from tests.runtime.engine.prompts import make_model, random_prompts
from tests.runtime.engine.scripted_shift import Script
from tests.units import tp

DRAFTS, SHORTEST, LONGEST = 4, 1, 3
PROMPTS = random_prompts((5, 33, 64, 65), seed=61)
"""Among them one token more than a block of DP and of TP2: with all but this token in the prefix
cache, vLLM lets its step check drafts that nobody has proposed."""
TOKENS = 18
PATIENCE_SECONDS = 600.0
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
PAIR = tp(0, 1)


def _words(*words: str) -> StructuredOutputsParams:
    params = StructuredOutputsParams(regex=f"({'|'.join(words)}){{60}}")
    params._backend, params._backend_was_auto = "xgrammar", True  # what vLLM's front end chooses
    return params


SAMPLED: list[dict[str, Any]] = [
    {"structured_outputs": _words("ab", "ba")},
    {"logprobs": 2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
]
"""Over greedy, one for each of the first prompts. Among the two words, drafts are right at times,
and at times not what the grammar allows."""


class Phases:
    """What a node generates in one phase after the other, and of how many drafts."""

    def __init__(self, node: real_node.RealNode) -> None:
        self._node = node
        self.tokens: dict[str, Any] = {}
        self.drafts: dict[str, dict[str, int]] = {}

    def add(self, name: str, generate: Callable[[], Any]) -> None:
        """Let the node generate something, as the phase of this name."""
        self._node.drafts.clear()
        self.tokens[name] = generate()
        self.drafts[name] = dict(self._node.drafts)


def stock(model: Path) -> dict[str, list[list[int]]]:
    """Return what stock generates without speculation: greedily, and as ``SAMPLED`` says."""
    common = {"temperature": 0.0, "ignore_eos": True}
    plain = [SamplingParams(**common, max_tokens=TOKENS + DRAFTS)] * len(PROMPTS)
    changed = [SamplingParams(**common | options, max_tokens=TOKENS) for options in SAMPLED]
    prompts = PROMPTS + PROMPTS[: len(SAMPLED)]
    found = real_node.tokens_of(real_node.stock_outputs(model, prompts, plain + changed, **V2))
    return {"longer": found[: len(PROMPTS)], "sampled": found[len(PROMPTS) :]}


def as_sampled(node: real_node.RealNode, unit: Any) -> list[str]:
    """Send a unit the first prompts, each with its own sampling; return the requests."""
    pairs = zip(PROMPTS, SAMPLED, strict=False)
    return [node.submit(unit, [prompt], TOKENS, **options)[0] for prompt, options in pairs]


def carried(node: real_node.RealNode, requests: list[str], counts: dict[str, Any]) -> Any:
    """Carry requests of engine 0 to the group, to engine 0 and to the group again."""
    node.wait_for_tokens(requests, 5)
    views = []
    for partition, tokens in (((PAIR,), 9), (singles(2), 13), ((PAIR,), 17)):
        views.append(node.switch(*partition, treatment=m.Treatment.CARRY))
        node.wait_for_tokens(requests, tokens)
    tokens_of_all = node.wait(requests)
    counts["carried"] = counts.get("carried", []) + [view.carried for view in views]
    counts["computed again"] = [view.recomputed for view in views]
    node.switch()
    return tokens_of_all


def paused(node: real_node.RealNode) -> list[list[int]]:
    """Let requests of engine 1 wait for one of the group."""
    requests = node.submit(alone(1), PROMPTS, TOKENS)
    node.wait_for_tokens(requests, 4)
    with node.bound(PAIR):
        node.generate(PAIR, PROMPTS[:1], 2)
    return node.wait(requests)


def samples_alike(node: real_node.RealNode) -> bool:
    """Return whether every member has sampled and judged for itself what the leader answers."""
    outputs = node.generate(PAIR, PROMPTS[:2], TOKENS, temperature=0.7)
    sequences = [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=False)]
    members = [node.probe(engine, probes.sequences) for engine in PAIR.engines]
    return all(
        any(kept[: len(sequence)] == sequence for kept in member)
        for member in members
        for sequence in sequences
    )


def seeded(node: real_node.RealNode) -> list[list[int]]:
    """Let the group sample: which drafts are right depends on requests' own draws alone."""
    options: dict[str, Any] = {"temperature": 0.2, "seed": 7}
    return node.wait(node.submit(PAIR, PROMPTS[:2], TOKENS, **options))


def with_wrong_drafts(node: real_node.RealNode, phases: Phases) -> None:
    """Let runners propose what other requests would need, then judge by others' drafts."""
    generate = lambda: node.generate(alone(0), PROMPTS, TOKENS)  # noqa: E731
    for name, probe in (
        ("drafts of others proposed", probes.propose_to_others),
        ("drafts of others judged", probes.judge_drafts_of_others),
    ):
        node.probe_all(probe, True)
        phases.add(name, generate)
        node.probe_all(probe, False)
    phases.add("dp again", generate)


def through_layouts(node: real_node.RealNode, phases: Phases) -> dict[str, Any]:
    """Generate in each layout and through switches; return what the switches said."""
    counts: dict[str, Any] = {}
    phases.add("dp", lambda: node.generate_spread(singles(2), PROMPTS, TOKENS))
    with node.bound(PAIR):
        phases.add("tp2", lambda: node.generate(PAIR, PROMPTS, TOKENS))
        phases.add("tp2 from the prefix cache", lambda: node.generate(PAIR, PROMPTS, TOKENS))
        counts["sample alike"] = samples_alike(node)
        phases.add("sampled in tp2", lambda: node.wait(as_sampled(node, PAIR)))
        phases.add("seeded in tp2", lambda: seeded(node))
    with scripted(node, PAIR, Script.SP) as ran, node.bound(PAIR):
        phases.add("sp2", lambda: node.generate(PAIR, PROMPTS, TOKENS))
        phases.add("seeded in sp2", lambda: seeded(node))
    counts["modes of sp2"] = sorted(mode for mode, steps in ran.items() if steps)
    phases.add("paused", lambda: paused(node))
    phases.add("sampled in dp", lambda: node.wait(as_sampled(node, alone(0))))
    with scripted(node, PAIR, Script.RANDOM) as ran:
        requests = node.submit(alone(0), PROMPTS, TOKENS)
        phases.add("carried", lambda: carried(node, requests, counts))
        sampled = as_sampled(node, alone(0))
        phases.add("sampled and carried", lambda: carried(node, sampled, counts))
    counts["carried in sp2"] = ran[Mode.SP]
    return counts


def main(directory: Path, method: str) -> dict[str, Any]:
    real_node.PATIENCE_SECONDS = PATIENCE_SECONDS
    model = write_looping(make_model("llama", directory), directory / "looping")
    expected = stock(model)
    speculation = {
        "method": method,
        "num_speculative_tokens": DRAFTS,
        "prompt_lookup_min": SHORTEST,
        "prompt_lookup_max": LONGEST,
    }
    with real_node.RealNode(
        model,
        2,
        max_sp=2,
        patience=PATIENCE_SECONDS,
        environment=V2,
        speculative_config=speculation,
        async_scheduling=method == n_grams.ON_DEVICE,
        disable_log_stats=False,
    ) as node:
        phases = Phases(node)
        runners = sorted(set(node.probe_all(probes.model_runner_module)))
        counts = through_layouts(node, phases)
        with_wrong_drafts(node, phases)
        deferred = node.probe_all(probes.deferred_samples)
        problems = node.audit()
    judged = [
        n_grams.judged(prompt, longer, TOKENS, DRAFTS, SHORTEST, LONGEST)
        for prompt, longer in zip(PROMPTS, expected["longer"], strict=True)
    ]
    return {
        "expected": [longer[:TOKENS] for longer in expected["longer"]],
        "expected sampled": expected["sampled"],
        "expected drafts": {
            "accepted": sum(accepted for accepted, _ in judged),
            "rejected": sum(rejected for _, rejected in judged),
        },
        "tokens": phases.tokens,
        "drafts": phases.drafts,
        "runners": runners,
        "deferred samples": deferred,
        "problems": problems,
        **counts,
    }


if __name__ == "__main__":
    module = "tests.runtime.engine.v2_speculation_main"
    json.dump(v2_program.run(module, Path(sys.argv[1]), sys.argv[2]), sys.stdout)
