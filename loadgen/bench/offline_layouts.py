"""What a policy that prefills in one layout and decodes in another could win at most (Seesaw, 4.1).

    python -m shoal.loadgen.bench.offline_layouts --hardware l40s --prompt-tokens 3000 ...

All requests are there at the beginning. Each static layout serves them in virtual time, with chunks
of several sizes. A *cycle* fills the KV of all engines with prompts in DP and then decodes all of
them in another layout: it takes the time of the prompts alone in the first layout, and what the
outputs add in the second. The switches take no time, and the layouts hand the KV over as asked:
``in place``, so that all of it may be used, or with room for it twice. So this is a bound from
above.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shoal.loadgen.workload import Arrival
from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.simulation.data_sheets import hardware_named
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import read_shape
from shoal.runtime.simulation.simulated_node import simulate

WHOLE_PROMPTS = 8192
"""Tokens of the steps of a cycle."""


def requests(count: int, prompt: int, output: int) -> list[Arrival]:
    """Return equal requests that come at once."""
    return [Arrival(0.0, prompt, output, 0) for _ in range(count)]


def seconds(node: Node, layout: Layout, chunk: int, asked: Sequence[Arrival]) -> float:
    """Return the time in which a layout serves requests.

    Args:
        node: the node.
        layout: that of all engines.
        chunk: most tokens of a step.
        asked: the requests.
    """
    found = replace(node, layout=layout, max_pp=layout.pp, max_num_batched_tokens=chunk)
    return max(life.ended or 0.0 for life in simulate(found, "manual", asked).lives)


def layouts(engines: int) -> list[Layout]:
    """Return all static layouts: groups of 1, 2, 4 or 8 engines, with and without stages."""
    sizes = [size for size in (1, 2, 4, 8) if size <= engines]
    return [Layout(tp=tp, pp=pp) for tp in sizes for pp in sizes if tp * pp <= engines]


def held(node: Node, tokens: int, copies: int) -> int:
    """Return how many requests of so many tokens the node's KV holds, each ``copies`` times."""
    kv = node.hardware.num_blocks(node.shape) * 16
    return node.engines * min(node.max_num_seqs, kv // (tokens * copies))


def cycle(node: Node, decode: Layout, prompt: int, output: int, count: int) -> float:
    """Return the requests per second of cycles that decode in this layout, ``count`` in each."""
    first, asked = requests(count, prompt, 1), requests(count, prompt, output)
    prefill = seconds(node, DP, WHOLE_PROMPTS, first)
    outputs = seconds(node, decode, WHOLE_PROMPTS, asked)
    return count / (prefill + outputs - seconds(node, decode, WHOLE_PROMPTS, first))


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each layout."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--model-shape", default="llama-3-8b-bf16")
    parser.add_argument("--weight-dtype", help="in place of the shape's")
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--output-tokens", type=int, required=True)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 2048, 8192])
    args = parser.parse_args(argv)
    shape = read_shape(args.model_shape)
    if args.weight_dtype is not None:
        shape = msgspec.structs.replace(shape, weight_dtype=args.weight_dtype)
    hardware, engines = hardware_named(args.hardware), args.engines
    seats = args.max_num_seqs
    node = Node(shape, hardware, engines, engines, max_num_seqs=seats, prefix_caching=False)
    prompt, output = args.prompt_tokens, args.output_tokens
    asked = requests(args.requests, prompt, output)
    for layout in layouts(engines):
        found = {chunk: len(asked) / seconds(node, layout, chunk, asked) for chunk in args.chunks}
        best = max(found, key=lambda chunk: found[chunk])
        print(f"static {layout.name}: {found[best]:.2f}/s, in chunks of {best}", flush=True)
    for copies, name in ((1, "in place"), (2, "KV twice")):
        count = held(node, prompt + output, copies)
        for layout in layouts(engines):
            if layout.pp == 1:
                rate = cycle(node, layout, prompt, output, count)
                print(f"cycle to {layout.name}, {name}: {rate:.2f}/s, {count} requests", flush=True)


if __name__ == "__main__":
    main()
