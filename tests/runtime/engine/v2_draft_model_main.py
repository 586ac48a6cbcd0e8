"""Speculative decoding by draft models with the V2 model runner on CPUs, by Triton's interpreter.

Run as ``python -m tests.runtime.engine.v2_draft_model_main DIRECTORY METHOD AHEAD``, where the
method is ``eagle`` or ``eagle3``, and AHEAD is 1 if steps are scheduled ahead. Writes to standard
output, as JSON, what stock vLLM generates without speculation, what a node of two engines generates
with it in each layout and through switches, and what its draft models proposed.
"""

import json
import sys
from pathlib import Path
from typing import Any

from shoal.policies.values.layouts import alone
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.draft_checkpoint import write_draft
from tests.looping_checkpoint import write_looping
from tests.runtime.engine import probes, real_node, v2_program
from tests.runtime.engine import v2_speculation_main as n_gram_main
from tests.runtime.engine.modes import scripted
from tests.runtime.engine.prompts import MODELS, make_model
from tests.runtime.engine.scripted_shift import Script
from tests.runtime.engine.v2_speculation_main import PAIR, PROMPTS, TOKENS, Phases

DRAFTS = 3
Proposals = list[dict[str, list[int]]]
"""For each prompt, what was proposed, by how many tokens the request had then."""


def proposals(node: real_node.RealNode, requests: list[str]) -> tuple[Proposals, bool]:
    """Return what was proposed for requests, and whether all members proposed the same.

    What a draft model proposes within a prompt is left out: nobody checks it.
    """
    found, alike = [dict[str, list[int]]() for _ in requests], True
    for kept in node.probe_all(probes.proposed):
        for merged, request, prompt in zip(found, requests, PROMPTS, strict=True):
            for known, drafts in kept.get(request, {}).items():
                if known > len(prompt):
                    alike &= merged.setdefault(str(known), drafts) == drafts
    return found, alike


class Watched:
    """Generates in phases, and keeps what is proposed in each."""

    def __init__(self, node: real_node.RealNode) -> None:
        self.node = node
        self.phases = Phases(node)
        self.proposed: dict[str, Proposals] = {}
        self.alike = True

    def add(self, name: str, requests: list[str]) -> None:
        """Let requests end, as the phase of this name."""
        self.phases.add(name, lambda: self.node.wait(requests))
        self.proposed[name], alike = proposals(self.node, requests)
        self.alike &= alike


def by_sequence(watched: Watched) -> list[Mode]:
    """Let the group run all steps by sequence, at last with wrong hidden states of single layers.

    Returns:
        The modes of these steps.
    """
    node = watched.node
    with scripted(node, PAIR, Script.SP) as ran, node.bound(PAIR):
        watched.add("sp2", node.submit(PAIR, PROMPTS, TOKENS))
        watched.phases.add("seeded in sp2", lambda: n_gram_main.seeded(node))
        node.probe_all(probes.confuse_layers, True)
        watched.add("with other hidden states", node.submit(PAIR, PROMPTS, TOKENS))
        node.probe_all(probes.confuse_layers, False)
    return sorted(mode for mode, steps in ran.items() if steps)


def through_layouts(node: real_node.RealNode) -> tuple[Watched, dict[str, Any]]:
    """Generate in each layout and through carries; return what the switches said, too."""
    watched, counts = Watched(node), dict[str, Any]()
    watched.add("dp", node.submit(alone(0), PROMPTS, TOKENS))
    watched.add("dp from the prefix cache", node.submit(alone(0), PROMPTS, TOKENS))
    with node.bound(PAIR):
        watched.add("tp2", node.submit(PAIR, PROMPTS, TOKENS))
        counts["sample alike"] = n_gram_main.samples_alike(node)
        watched.phases.add("seeded in tp2", lambda: n_gram_main.seeded(node))
    counts["modes of sp2"] = by_sequence(watched)
    watched.phases.add("paused", lambda: n_gram_main.paused(node))
    carried = lambda requests: n_gram_main.carried(node, requests, counts)  # noqa: E731
    with scripted(node, PAIR, Script.RANDOM) as ran:
        sampled = n_gram_main.as_sampled(node, alone(0))
        watched.phases.add("sampled and carried", lambda: carried(sampled))
        requests = node.submit(alone(0), PROMPTS, TOKENS)
        watched.phases.add("carried", lambda: carried(requests))
    counts["carried in sp2"] = ran[Mode.SP]
    watched.proposed["carried"], alike = proposals(node, requests)
    watched.alike &= alike
    requests = node.submit(alone(0), PROMPTS, TOKENS)
    node.wait_for_tokens(requests, 5)
    node.switch(PAIR, treatment=m.Treatment.CARRY)
    node.probe_all(probes.spoil_draft_kv)
    watched.add("with other KV", requests)
    node.switch()
    return watched, counts


def main(directory: Path, method: str, ahead: bool) -> dict[str, Any]:
    real_node.PATIENCE_SECONDS = n_gram_main.PATIENCE_SECONDS
    model = write_looping(make_model("llama", directory), directory / "looping")
    draft = write_draft(model, directory / "draft", MODELS["llama"], method)
    expected = n_gram_main.stock(model)
    with real_node.RealNode(
        model,
        2,
        max_sp=2,
        patience=n_gram_main.PATIENCE_SECONDS,
        environment=n_gram_main.V2,
        speculative_config={
            "method": method,
            "model": str(draft),
            "num_speculative_tokens": DRAFTS,
        },
        async_scheduling=ahead,
        disable_log_stats=False,
    ) as node:
        node.probe_all(probes.keep_proposals)
        watched, counts = through_layouts(node)
        result = {
            "runners": sorted(set(node.probe_all(probes.model_runner_module))),
            "owned": node.probe_all(probes.owned_bytes),
            "loaded": node.probe_all(probes.loaded_bytes),
            "deferred samples": node.probe_all(probes.deferred_samples),
            "problems": node.audit(),
        }
    return {
        "expected": [longer[:TOKENS] for longer in expected["longer"]],
        "expected sampled": expected["sampled"],
        "tokens": watched.phases.tokens,
        "drafts": watched.phases.drafts,
        "proposed": watched.proposed,
        "propose alike": watched.alike,
        **result,
        **counts,
    }


if __name__ == "__main__":
    arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1"
    json.dump(v2_program.run("tests.runtime.engine.v2_draft_model_main", *arguments), sys.stdout)
