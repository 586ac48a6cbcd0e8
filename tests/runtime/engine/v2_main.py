"""The V2 model runner on CPUs, by Triton's interpreter, which vLLM must be imported with.

Run as ``python -m tests.runtime.engine.v2_main DIRECTORY``. Writes to standard output, as JSON,
what stock vLLM and each layout of a two-engine node generate for the same prompts.
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
        modes = node.probe(1, probes.take_modes)
        tokens["paused dp"] = node.wait(paused)
        problems = node.audit()
    json.dump(
        {
            "tokens": tokens,
            "runners": runners,
            "owned": owned,
            "modes": sorted(mode for mode, steps in modes.items() if steps),
            "problems": problems,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
