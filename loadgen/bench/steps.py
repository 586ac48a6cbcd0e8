"""``shoal bench steps``: times steps of a node in each of its layouts.

It fits a hardware file to the times, which the simulator and the policies use to predict such
nodes. It starts the node itself and measures it through its public API. So the times include what
the front end adds to a step, and HTTP adds to the first token.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from shoal.loadgen.bench.measures import (
    Bench,
    Sizes,
    decode_context,
    decode_seconds,
    first_tokens,
)
from shoal.loadgen.bench.systems import SHOAL, Layout, System
from shoal.loadgen.bench.token_client import Client
from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import Layout as UnitLayout
from shoal.policies.values.layouts import layouts_up_to, tensor_parallel
from shoal.policies.values.partition import units_of
from shoal.runtime.node.supervisor import StopRequestedError
from shoal.runtime.simulation.calibration import START, Sample, fit, predicted
from shoal.runtime.simulation.shape_files import FileError, HardwareFile, ShapeFile, read_shape
from shoal.server.commands import serve
from shoal.server.errors import UserError
from shoal.server.files import write_file

MESSAGES = 3
"""Messages of a request before its first token: to the controller, to the engine, and back."""
DEMO_SHAPE = "shoal-demo"
BATCHES, PROMPTS = (1, 4, 16), (32, 256, 1024)


def main(argv: Sequence[str]) -> int:
    """Run ``shoal bench steps`` and return the exit code.

    Raises:
        UserError: the arguments are not valid.
    """
    parser = argparse.ArgumentParser(
        prog="shoal bench steps",
        description="Time steps and fit a hardware file. Other options are those of 'shoal serve'.",
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="the hardware file to write")
    add(
        "--model-shape",
        default=DEMO_SHAPE,
        metavar="FILE|NAME",
        help="shape of the served model (default: %(default)s)",
    )
    add("--batches", type=int, nargs="+", default=BATCHES, metavar="N", help="requests per unit")
    add("--prompts", type=int, nargs="+", default=PROMPTS, metavar="N", help="prompt tokens")
    add("--tokens", type=int, default=64, help="prompt and output of a batch's requests")
    args, serve_argv = parser.parse_known_args(argv)
    try:
        shape = read_shape(args.model_shape)
    except FileError as error:
        raise UserError(f"--model-shape: {error}") from error

    def on_ready(node: serve.ReadyNode) -> None:
        serve.check_measurable(node)
        samples = asyncio.run(_samples(node, args))
        hardware = fit(shape, samples, replace(START, memory_bytes=_memory_bytes() / node.engines))
        write_file(args.output, msgspec.json.format(msgspec.json.encode(hardware)) + b"\n")
        print(table(shape, hardware, samples), flush=True)
        raise StopRequestedError

    return serve.run(
        # The fit needs times of TP for steps of every length.
        ["--max-sp", "1", *serve_argv, "--port", "0"],
        on_ready,
        lambda line: print(line, file=sys.stderr),
    )


def table(shape: ShapeFile, hardware: HardwareFile, samples: Sequence[Sample]) -> str:
    """Return the measured times beside those that the hardware file predicts, in milliseconds."""
    lines = [
        f"{'layout':<8}{'decodes':>8}{'context':>9}{'prompt':>8}{'measured':>10}{'predicted':>11}"
    ]
    for sample in samples:
        layout = f"sp{sample.layout.tp}" if sample.sp > 1 else sample.layout.name
        expected = predicted(shape, hardware, sample)
        lines.append(
            f"{layout:<8}{_total(sample, 'decodes'):>8}{_total(sample, 'context_tokens'):>9}"
            f"{_total(sample, 'prefill_tokens'):>8}"
            f"{1000 * sample.seconds:>10.2f}{1000 * expected:>11.2f}"
            f"{expected / sample.seconds - 1:>+8.1%}"
        )
    return "\n".join(lines)


def _total(sample: Sample, work: str) -> int:
    return sum(getattr(batch, work) for batch in sample.batches)


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


async def _samples(node: serve.ReadyNode, args: Namespace) -> list[Sample]:
    layouts = [
        Layout(each.name, tuple(unit.engines for unit in units_of(node.engines, each)))
        for each in layouts_up_to(node.max_group)
    ]
    system = System(SHOAL, (), tuple(layouts), switches=True)
    samples: list[Sample] = []
    async with Client(node.address, node.model, node.admin) as client:
        for layout in layouts:
            await client.call("POST", "/admin/layout", {"units": layout.partition})
            sizes = Sizes(decode_tokens=args.tokens)
            bench = Bench(client, system, layout, sizes, random.Random(0))
            samples += [sample async for sample in _decodes(bench, args.batches)]
            samples += [sample async for sample in _prompts(bench, args.prompts)]
    return samples


async def _decodes(bench: Bench, batches: Sequence[int]) -> AsyncIterator[Sample]:
    tokens = bench.sizes.decode_tokens
    for count in batches:
        await bench.batch(count, tokens, tokens, count)
        runs = [
            await bench.batch(count, tokens, tokens, count)
            for _ in range(bench.sizes.decode_repeats)
        ]
        times = [decode_seconds(answer, tokens) for run in runs for answer in run]
        batch = Batch(count, count * decode_context(tokens))
        yield Sample(_formed(bench.layout), (batch,), statistics.median(times))


async def _prompts(bench: Bench, prompts: Sequence[int]) -> AsyncIterator[Sample]:
    for tokens in prompts:
        times = await first_tokens(bench, tokens, bench.sizes.prompt_repeats)
        batch = Batch(prefill_tokens=tokens, prefill_context=tokens // 2)
        yield Sample(_formed(bench.layout), (batch,), statistics.median(times), MESSAGES)


def _formed(layout: Layout) -> UnitLayout:
    return tensor_parallel(layout.units[0]).layout
