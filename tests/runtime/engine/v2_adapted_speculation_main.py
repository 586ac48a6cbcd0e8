"""LoRA adapters with a draft model on the V2 model runner, on CPUs by Triton's interpreter.

Run as ``python -m tests.runtime.engine.v2_adapted_speculation_main DIRECTORY``. Writes to standard
output, as JSON, what stock vLLM generates without speculation, and what a node of two engines
generates with it in each layout and through switches.
"""

import json
import sys
from pathlib import Path
from typing import Any

from shoal.policies.values.partition import singles
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.draft_checkpoint import write_draft
from tests.looping_checkpoint import write_looping
from tests.runtime.engine import real_node, v2_program
from tests.runtime.engine import v2_speculation_main as n_gram_main
from tests.runtime.engine.adapters import (
    Adapters,
    named,
    stock_tokens_of_each,
    submitted,
    write_adapters,
)
from tests.runtime.engine.modes import scripted
from tests.runtime.engine.prompts import MODELS, make_model
from tests.runtime.engine.scripted_shift import Script
from tests.runtime.engine.v2_speculation_main import PAIR, TOKENS, V2, Phases

DRAFTS = 3
PROMPTS = n_gram_main.PROMPTS[:3]
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "max_num_seqs": 12}


def through_layouts(node: real_node.RealNode, adapters: Adapters) -> tuple[Phases, dict[str, Any]]:
    """Generate in each layout and through carries; return what was carried and ran, too."""
    phases, counts = Phases(node), dict[str, Any]()
    for name, partition in (("dp", singles(2)), ("tp2", (PAIR,))):
        node.switch(*partition)
        phases.add(name, lambda: node.wait(submitted(node, adapters, PROMPTS, TOKENS)))
    node.switch()
    with scripted(node, PAIR, Script.SP) as ran, node.bound(PAIR):
        phases.add("sp2", lambda: node.wait(submitted(node, adapters, PROMPTS, TOKENS)))
    counts["modes of sp2"] = sorted(mode for mode, steps in ran.items() if steps)

    def carried() -> list[list[int]]:
        requests = submitted(node, adapters, PROMPTS, TOKENS)
        node.wait_for_tokens(requests, 5)
        views = []
        for partition, tokens in (((PAIR,), 9), (singles(2), 13), ((PAIR,), 17)):
            views.append(node.switch(*partition, treatment=m.Treatment.CARRY))
            node.wait_for_tokens(requests, tokens)
        counts["carried"] = [view.carried for view in views]
        counts["computed again"] = [view.recomputed for view in views]
        return node.wait(requests)

    with scripted(node, PAIR, Script.RANDOM) as ran:
        phases.add("carried", carried)
    counts["carried in sp2"] = ran[Mode.SP]
    return phases, counts


def main(directory: Path) -> dict[str, Any]:
    real_node.PATIENCE_SECONDS = n_gram_main.PATIENCE_SECONDS
    model = write_looping(make_model("llama", directory), directory / "looping")
    draft = write_draft(model, directory / "draft", MODELS["llama"], "eagle3")
    adapters = write_adapters(directory / "adapters", MODELS["llama"])
    expected = stock_tokens_of_each(model, adapters, PROMPTS, TOKENS, LORA, **V2)
    with real_node.RealNode(
        model,
        2,
        adapters=named(adapters),
        max_sp=2,
        patience=n_gram_main.PATIENCE_SECONDS,
        environment=V2,
        speculative_config={
            "method": "eagle3",
            "model": str(draft),
            "num_speculative_tokens": DRAFTS,
        },
        disable_log_stats=False,
        **LORA,
    ) as node:
        phases, counts = through_layouts(node, adapters)
        problems = node.audit()
    return {
        "expected": expected,
        "tokens": phases.tokens,
        "drafts": phases.drafts,
        "problems": problems,
        **counts,
    }


if __name__ == "__main__":
    module = "tests.runtime.engine.v2_adapted_speculation_main"
    json.dump(v2_program.run(module, Path(sys.argv[1])), sys.stdout)
