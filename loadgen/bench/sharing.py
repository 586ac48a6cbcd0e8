"""``shoal bench sharing``: DP with whole weights, DP that streams, and groups, by their batches.

As SiDP's Figures 9 and 11 and its Figure 13. One node is measured at both levels of
``--share-weights`` and in all its layouts, one after the other; the weights are made up. With
``--projected`` nothing is started, and all times come from the cost model and the simulator.
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.loadgen.bench import one_node
from shoal.loadgen.bench.dummy_model import FP8_KINDS, in_fp8, read_shape, write_model
from shoal.loadgen.bench.markdown import MISSING, ms, number, rows
from shoal.loadgen.bench.measures import (
    Bench,
    Sizes,
    decode_context,
    decode_seconds,
    random_prompt,
)
from shoal.loadgen.bench.server_process import ServerProcess, free_port
from shoal.loadgen.bench.sharing_projected import Request, System, job, project, systems
from shoal.loadgen.bench.system_info import environment
from shoal.loadgen.bench.systems import SHOAL, Layout
from shoal.loadgen.bench.systems import System as Served
from shoal.loadgen.bench.token_client import Client, RequestFailedError
from shoal.policies.values.layouts import DP, layouts_up_to
from shoal.policies.values.layouts import Layout as UnitLayout
from shoal.policies.values.partition import units_of
from shoal.runtime.config import ENGINE_COUNTS
from shoal.runtime.simulation.shape_files import FileError
from shoal.server.errors import UserError
from shoal.server.number_options import check_positive

MODEL = "bench"
BATCHES = (1, 8, 32, 64, 128, 256)
WHOLE, STREAMING = "DP", "WaS"
"""Columns: DP with whole weights, and DP that streams what the engine does not keep."""
MOST_STREAMS = 8


class Sharing(msgspec.Struct):
    """What was found. Times are in seconds."""

    is_projected: bool
    model: str
    device: str
    engines: int
    share: int
    context: int
    """Tokens of each request in the middle of its measured part."""
    steps: dict[str, dict[int, float]]
    """Time of a step that decodes so many requests on each GPU, by column."""
    jobs: dict[str, float]
    """Time in which all requests of the job ended, by system."""
    output_tokens: int
    """Of all requests of the job."""
    missing: str = ""
    """Why there are no times with whole weights."""
    command: list[str] = []
    environment: dict[str, Any] = {}


def main(argv: Sequence[str]) -> int:
    """Run ``shoal bench sharing`` and return the exit code.

    Raises:
        UserError: an argument is not valid, or the node did not start.
    """
    args, serve_options = _parser().parse_known_args(argv)
    check_positive(args, "tokens", "repeats", "prompt_tokens", "output_tokens")
    if min(args.batches) < 1:
        raise UserError(f"--batches {min(args.batches)}: batches have at least one request")
    share = args.share_weights = args.share_weights or args.engines
    if not 1 < share <= args.engines:
        raise UserError(f"--share-weights {share}: of {args.engines} engines, 2 to all may share")
    if args.projected is None:
        return one_node.run(lambda log: _measure(args, serve_options, log), report, args)
    if serve_options:
        raise UserError(f"{serve_options[0]}: --projected starts no node")

    async def projected(_log: Path) -> Sharing:
        return _project(args)

    return one_node.run(projected, report, args)


def _parser() -> argparse.ArgumentParser:
    parser = one_node.parser("sharing", "Measure what shared weights cost by batch sizes.", ())
    add = parser.add_argument
    add("--model-shape", required=True, metavar="FILE|NAME", help="of the model")
    add("--fp8", choices=FP8_KINDS, help="the weights are FP8, with one scale for each of these")
    add("--projected", metavar="HARDWARE", help="start no node; a hardware file or a GPU's name")
    add("--engines", type=int, default=2, choices=ENGINE_COUNTS[1:], help="(default: %(default)s)")
    add("--share-weights", type=int, choices=ENGINE_COUNTS[1:], help="(default: all engines)")
    add("--batches", type=int, nargs="+", default=BATCHES, metavar="N", help="requests on each GPU")
    add("--tokens", type=int, default=512, help="prompt and output of each (default: %(default)s)")
    add("--repeats", type=int, default=2, help="of each batch (default: %(default)s)")
    add("--job", type=int, default=0, metavar="N", help="also time a job of so many requests")
    add("--prompt-tokens", type=int, default=2000, help="of the job (default: %(default)s)")
    add("--output-tokens", type=int, default=400, help="their mean (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the job (default: %(default)s)")
    return parser


def _job(args: Namespace) -> list[Request]:
    return job(args.job, args.prompt_tokens, args.output_tokens, args.seed)


def _project(args: Namespace) -> Sharing:
    if args.fp8 is not None:
        raise UserError("--fp8: with --projected, the shape says what the weights are")
    requests = _job(args)
    try:
        found = project(
            args.model_shape,
            args.projected,
            args.engines,
            args.share_weights,
            {size: size * decode_context(args.tokens) for size in args.batches},
            requests,
        )
    except FileError as error:
        raise UserError(str(error)) from error
    return Sharing(
        is_projected=True,
        model=args.model_shape,
        device=args.projected,
        engines=args.engines,
        share=args.share_weights,
        context=decode_context(args.tokens),
        steps=found.steps,
        jobs=found.jobs,
        output_tokens=sum(request.output_tokens for request in requests),
        missing=found.missing,
    )


# --- a real node ----------------------------------------------------------------------------------


async def _measure(args: Namespace, serve_options: Sequence[str], log: Path) -> Sharing:
    port, admin = free_port(), free_port()
    config = read_shape(args.model_shape)
    if args.fp8 is not None:
        config = in_fp8(config, args.fp8)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_model(model, config)
        command = one_node.serve_command(
            MODEL,
            [str(model), "--load-format", "dummy", *serve_options],
            port,
            *("--admin-port", str(admin), "--policy", "manual", "--engines", str(args.engines)),
            *("--share-weights", str(args.share_weights), "--no-enable-prefix-caching"),
            *("--max-num-seqs", str(max(args.batches) * args.engines)),
        )
        server = ServerProcess(command, log, os.environ)
        try:
            url, admin_url = (f"http://127.0.0.1:{each}" for each in (port, admin))
            async with Client(url, MODEL, admin_url) as client:
                await server.wait_until_ready(client, "/ready")
                found = await _Measuring(client, args).run()
        finally:
            server.stop()
    found.command = one_node.shown(command)
    return found


class _Measuring:
    """Takes the times of one node, which shares weights now."""

    def __init__(self, client: Client, args: Namespace) -> None:
        self._client, self._args = client, args
        about = environment()
        self._found = Sharing(
            is_projected=False,
            model=args.model_shape + (f", FP8 by {args.fp8}" if args.fp8 else ""),
            device=next(iter(about["gpus"] or ["CPU"])),
            engines=args.engines,
            share=args.share_weights,
            context=decode_context(args.tokens),
            steps={},
            jobs={},
            output_tokens=0,
            environment=about,
        )

    async def run(self) -> Sharing:
        """Measure the shared level first, because the node is there."""
        args, requests = self._args, _job(self._args)
        self._found.output_tokens = sum(request.output_tokens for request in requests)
        served = systems(args.engines, args.share_weights) if requests else []
        for layout in layouts_up_to(args.engines):
            name = STREAMING if layout == DP else layout.name.upper()
            self._found.steps[name] = await self._decodes(layout)
        await self._jobs([one for one in served if one.share > 1], requests)
        try:
            await self._share(1)
        except RequestFailedError as error:  # such as a model that is larger than a GPU
            self._found.missing = str(error)
            return self._found
        self._found.steps[WHOLE] = await self._decodes(DP)
        await self._jobs([one for one in served if one.share == 1], requests)
        return self._found

    async def _share(self, share: int) -> None:
        await self._client.call("POST", "/admin/memory", {"share_weights": share})

    async def _arrange(self, layout: UnitLayout) -> Layout:
        units = tuple(unit.engines for unit in units_of(self._args.engines, layout))
        arranged = Layout(layout.name, units)
        await self._client.call("POST", "/admin/policy", {"policy": "manual"})
        await self._client.call("POST", "/admin/layout", {"units": arranged.partition})
        return arranged

    async def _decodes(self, layout: UnitLayout) -> dict[int, float]:
        tokens, arranged = self._args.tokens, await self._arrange(layout)
        bench = Bench(
            self._client,
            Served(SHOAL, (), (arranged,), switches=True),
            arranged,
            Sizes(decode_tokens=tokens),
            random.Random(0),
        )
        found = {}
        for size in self._args.batches:
            count = size * layout.tp
            runs = [
                await bench.batch(count, tokens, tokens, min(count, MOST_STREAMS))
                for _ in range(self._args.repeats)
            ]
            answers = [answer for run in runs for answer in run if answer.progress]
            found[size] = statistics.median(decode_seconds(one, tokens) for one in answers)
        return found

    async def _jobs(self, served: Sequence[System], requests: Sequence[Request]) -> None:
        rng = random.Random(self._args.seed)
        for system in served:
            if system.moves_memory:
                continue  # the node would have had to be started so
            await self._arrange(system.layout)
            await self._client.call("POST", "/admin/policy", {"policy": system.policy})
            sent = [
                self._client.generate(random_prompt(rng, one.prompt_tokens), one.output_tokens)
                for one in requests
            ]
            answers = await asyncio.gather(*sent)
            began = min(answer.sent for answer in answers)
            self._found.jobs[system.name] = max(answer.ended for answer in answers) - began


# --- the report -----------------------------------------------------------------------------------


_STEPS = (
    f"tokens each. *{WHOLE}* has whole weights. *{STREAMING}* streams, as {{share}} engines share "
    "the weights of layers. A group decodes the requests of all its GPUs. The last column is the "
    f"better of {STREAMING} and groups."
)
_JOB = (
    "All requests of a job are there at its start. They have outputs of very different lengths, "
    "{tokens:,} tokens in all, so the last ones run in small batches."
)


def report(found: Sharing) -> str:
    """Return the tables in Markdown."""
    kind = "projected" if found.is_projected else "measured"
    lines = [
        f"# Shared weights by batch size, {kind}: {found.model}, {found.engines} {found.device}",
        "",
        f"The time in ms of a step that decodes so many requests on each GPU, of {found.context:,} "
        + _STEPS.format(share=found.share),
        "",
        *_steps(found),
    ]
    if found.missing:
        lines += ["", f"There is nothing with whole weights: {found.missing}"]
    if found.jobs:
        lines += ["", _JOB.format(tokens=found.output_tokens), "", *_jobs(found)]
    return "\n".join(lines)


def _steps(found: Sharing) -> list[str]:
    groups = [name for name in found.steps if name not in (WHOLE, STREAMING)]
    columns = [name for name in (WHOLE, STREAMING, *groups) if name in found.steps]
    shared = [found.steps[name] for name in (STREAMING, *groups)]
    body = []
    for size in found.steps[STREAMING]:
        best = min(times[size] for times in shared)
        cells = [ms(found.steps[name].get(size)) for name in columns]
        body.append([number(size), *cells, ms(best)])
    return rows(["requests on each GPU", *columns, "the better"], body)


def _jobs(found: Sharing) -> list[str]:
    base = next(iter(found.jobs.values()))
    body = [
        [name, f"{seconds:.1f}", number(found.output_tokens / seconds), f"{base / seconds:.2f}"]
        for name, seconds in found.jobs.items()
    ]
    first = next(iter(found.jobs), MISSING)
    return rows(["", "seconds", "output tokens/s", f"rate beside {first}"], body)
