"""The V2 model runner on CPUs, by Triton's interpreter, which vLLM must be imported with.

Run as ``python -m tests.runtime.engine.v2_main DIRECTORY``. Writes to standard output, as JSON,
what stock vLLM and each layout of a two-engine node generate for the same prompts, and whether the
members of its group sample alike.
"""

import json
import sys
from pathlib import Path

from tests.runtime.engine import triton_interpreter  # isort: skip - before vLLM
from tests import preloaded
from tests.runtime.engine import probes, real_node
from tests.runtime.engine.prompts import SHARED, make_model, random_prompts
from tests.runtime.engine.scripted_shift import Script

PROMPTS = [*random_prompts((5, 33, 70), seed=3), SHARED[0][:90]]
TOKENS = 16
UNITS = [(0,), (1,)]
GROUP = (0, 1)


def samples_alike(node: real_node.RealNode) -> bool:
    """Return whether every member has sampled for itself what the leader answers."""
    prompts = PROMPTS[:2]
    outputs = node.generate(GROUP, prompts, 4, temperature=1.0)
    sequences = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    members = [node.probe(engine, probes.sequences) for engine in GROUP]
    return all(
        any(kept[: len(sequence)] == sequence for kept in member)
        for member in members
        for sequence in sequences
    )


def main(directory: Path) -> None:
    preloaded.FIRST.append(triton_interpreter.__name__)
    real_node.PATIENCE_SECONDS = 250.0
    model = make_model("llama", directory)
    tokens = {"stock": real_node.stock_tokens(model, PROMPTS, TOKENS, VLLM_USE_V2_MODEL_RUNNER="1")}
    with real_node.RealNode(
        model, 2, patience=250.0, max_sp=2, environment={"VLLM_USE_V2_MODEL_RUNNER": "1"}
    ) as node:
        runners = sorted(set(node.probe_all(probes.model_runner_module)))
        tokens["dp"] = node.generate_spread(UNITS, PROMPTS, TOKENS)
        paused = node.submit((1,), PROMPTS, TOKENS)
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
        tokens["paused dp"] = node.wait(paused)
        problems = node.audit()
    json.dump(
        {
            "tokens": tokens,
            "runners": runners,
            "owned": owned,
            "modes": sorted(mode for mode, steps in modes.items() if steps),
            "sample alike": dict(zip(("one has drawn", "bound again"), alike, strict=True)),
            "problems": problems,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
