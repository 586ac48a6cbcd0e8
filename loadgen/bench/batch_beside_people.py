"""``shoal bench batch``: people's latencies on one node, without a batch and with one beside them.

vLLM's own client sends people's requests: the same arrivals and lengths each time, with other
prompts. The batch comes through ``/v1/files`` and ``/v1/batches``, by the ``openai`` client, and is
too large for the time. One server works in one way after the other; each way is measured without
the batch, with it, and, if there are more runs, in the opposite order.
"""

import argparse
import json
import os
import random
import shutil
import sys
import time
from argparse import Namespace
from asyncio import run as run_async
from asyncio import sleep
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import openai

from shoal.loadgen.bench.campaign import devices_idle, say
from shoal.loadgen.bench.dummy_model import read_shape, write_model
from shoal.loadgen.bench.markdown import ms, number, rows, slower
from shoal.loadgen.bench.measures import random_prompt
from shoal.loadgen.bench.rates import read_lengths
from shoal.loadgen.bench.server_process import ServerFailedError, ServerProcess, free_port
from shoal.loadgen.bench.system_info import environment
from shoal.loadgen.bench.systems import SERVED_NAME, System
from shoal.loadgen.bench.token_client import Client, RequestFailedError
from shoal.loadgen.bench.traffic import MAX_FAILED, Way, enter, seed_of, systems, ways
from shoal.loadgen.bench.traffic_clients import (
    Load,
    random_load,
    replay_by_vllm,
    vllm_arguments,
)
from shoal.loadgen.bench.traffic_workloads import TraceWriter, read_traffic
from shoal.loadgen.bench.vllm_client import LoadFailedError, VllmClient
from shoal.loadgen.shapes import Lengths
from shoal.loadgen.summary import quantile
from shoal.loadgen.workload import Workload
from shoal.policies.registry import UnknownPolicyError, get_policy
from shoal.runtime.config import ENGINE_COUNTS
from shoal.server.errors import UserError
from shoal.server.number_options import check_at_least, check_positive

ENDPOINT: Final = "/v1/completions"
LINES_PER_SECOND = 50
"""Lines of the batch for each engine and second: more than an engine answers."""
POLL_SECONDS = 0.1
PEOPLE = "poisson --rate 2 --duration 30 --prompt-tokens 100:3000 --output-tokens 20:300"
BATCH = "100:1500,20:300"
_WARM_UP = 8


class Measured(msgspec.Struct):
    """What people and the batch got in all runs of one kind. Times are in seconds."""

    ttft: list[float] = []
    """Of each of people's requests."""
    tpot: list[float] = []
    seconds: float = 0.0
    """From the first request of people to the last answer, of all runs together."""
    lines: int = 0
    """Lines of the batch that were answered meanwhile."""
    line_tokens: int = 0
    """Their output tokens."""
    layouts: list[str] = []
    """The node's layout at the end of each run."""


class WayFigures(msgspec.Struct):
    """The runs of one way."""

    alone: Measured
    beside: Measured


class Results(msgspec.Struct):
    """One run of the benchmark."""

    command: list[str]
    environment: dict[str, Any]
    people: str
    batch: str
    start_seconds: float
    ways: dict[str, WayFigures]


def main(argv: Sequence[str]) -> int:
    """Run ``shoal bench batch`` and return the exit code.

    Raises:
        UserError: the arguments are not valid, or the node or a client failed.
    """
    args, serve_options = _parser().parse_known_args(argv)
    check_at_least(args, 1, "runs")
    check_positive(args, "lines_per_second")
    workload = read_traffic(args.workload, args.seed).workload
    lengths = read_lengths(args.batch, "--batch")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        write_model(args.out / "model", read_shape(args.model_shape))
        shutil.rmtree(args.out / "batches", ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write to {args.out}: {error.strerror}") from error
    system = _system(args, serve_options)
    try:
        results = run_async(_measure(args, system, _ways(args, system), workload, lengths))
    except (ServerFailedError, LoadFailedError, RequestFailedError, openai.APIError) as error:
        raise UserError(str(error)) from error
    text = report(results)
    (args.out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    (args.out / "report.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shoal bench batch",
        description="Measure people's latencies without a batch and with one beside them. Options "
        "that are not listed here are those of 'shoal serve'.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model-shape", required=True, metavar="NAME|FILE", help="a built-in one, or config.json")
    add("--engines", type=int, required=True, choices=ENGINE_COUNTS, help="GPUs to use")
    add("--out", type=Path, required=True, metavar="DIR", help="results, report, logs, batches")
    add("--ways", nargs="+", help="layouts and policies (default: dp, tpN, adaptive)")
    add("--workload", default=PEOPLE, help="people's requests (default: %(default)s)")
    add(
        "--batch", default=BATCH, metavar="PROMPT,OUTPUT", help="tokens of each line, N or LOW:HIGH"
    )
    add("--lines-per-second", type=float, default=LINES_PER_SECOND, help="for each engine")
    add("--runs", type=int, default=1, help="of each kind (default: %(default)s)")
    add("--seed", type=int, default=0, help="of what is made up (default: %(default)s)")
    return parser


def _system(args: Namespace, serve_options: Sequence[str]) -> System:
    """Return Shoal with its own defaults, but for a directory of batches."""
    shoal = systems(args.engines, str(args.out / "model"))[-1]
    own = ("--batch-dir", str(args.out / "batches"), *serve_options)
    return System(shoal.name, (*shoal.command, *own), shoal.layouts, switches=True)


def _ways(args: Namespace, system: System) -> list[Way]:
    """Return the ways that were asked for.

    Raises:
        UserError: one is neither a layout nor a policy.
    """
    layouts = {way.name: way for way in ways(system, ())}
    asked = args.ways or [*layouts, "adaptive"]
    try:
        return [layouts.get(name) or Way(name, policy=get_policy(name).name) for name in asked]
    except UnknownPolicyError as error:
        raise UserError(f"--ways: no layout of {', '.join(layouts)}, and {error}") from error


# --- the run --------------------------------------------------------------------------------------


async def _measure(
    args: Namespace, system: System, asked: Sequence[Way], people: Workload, lengths: Lengths
) -> Results:
    await devices_idle()
    port, admin_port = free_port(), free_port()
    address, admin = (f"http://127.0.0.1:{number}" for number in (port, admin_port))
    command = system.argv(port, admin_port)
    server = ServerProcess(command, args.out / "shoal.log", os.environ)
    results = Results(command, environment(), args.workload, args.batch, 0.0, {})
    try:
        async with AsyncExitStack() as stack:
            vllm = await stack.enter_async_context(VllmClient(args.out / "client.log"))
            client = await stack.enter_async_context(Client(address, SERVED_NAME, admin))
            asking = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
            batches = await stack.enter_async_context(asking)
            results.start_seconds = await server.wait_until_ready(client, system.ready_path)
            say(f"ready after {results.start_seconds:.1f} s")
            runs = _Runs(args, address, client, vllm, batches, people, lengths)
            for way in asked:
                await enter(client, system, way)
                results.ways[way.name] = await runs.of(way)
    finally:
        server.stop()
    return results


class _Runs:
    """People's requests, again and again, with a batch beside them or without."""

    def __init__(
        self,
        args: Namespace,
        address: str,
        client: Client,
        vllm: VllmClient,
        batches: openai.AsyncOpenAI,
        people: Workload,
        lengths: Lengths,
    ) -> None:
        self._args = args
        self._address = address
        self._client = client
        self._vllm = vllm
        self._batches = batches
        self._people = people
        self._lengths = lengths
        self._writer = TraceWriter(args.out / "traces")

    async def of(self, way: Way) -> WayFigures:
        """Return the figures of a way, which the node is in."""
        found = WayFigures(Measured(), Measured())
        warm_up = random_load("warm-up", _WARM_UP, _WARM_UP, 2000, 8)
        await self._send(f"{way.name} warm-up", warm_up)
        for turn in range(self._args.runs):
            for beside in (False, True) if turn % 2 == 0 else (True, False):
                if beside:
                    await self._beside(f"{way.name} {turn} beside", found.beside)
                else:
                    await self._run(f"{way.name} {turn} alone", found.alone)
        return found

    async def _beside(self, name: str, into: Measured) -> None:
        async with self._batch(name) as batch_id:
            before = await self._batches.batches.retrieve(batch_id)
            began = time.monotonic()
            await self._run(name, into)
            after = await self._batches.batches.retrieve(batch_id)
            check_in_work(after)
        into.lines += _done(after) - _done(before)
        into.line_tokens += _tokens(after) - _tokens(before)
        say(f"{name}: {_done(after) - _done(before)} lines in {time.monotonic() - began:.1f} s")

    @asynccontextmanager
    async def _batch(self, name: str) -> AsyncIterator[str]:
        """Have the node work on a batch for as long as the context lasts; give its id."""
        seconds = max(arrival.at for arrival in self._people.arrivals) + 15.0
        count = round(self._args.lines_per_second * self._args.engines * seconds)
        content = b"".join(self._line(name, index) for index in range(count))
        api = self._batches
        file = await api.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await api.batches.create(
            input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h"
        )
        await self._until(batch.id, "in_progress")
        yield batch.id
        await api.batches.cancel(batch.id)
        await self._until(batch.id, "cancelled")

    async def _until(self, batch_id: str, status: str) -> None:
        while (batch := await self._batches.batches.retrieve(batch_id)).status != status:
            check_in_work(batch)
            await sleep(POLL_SECONDS)

    def _line(self, name: str, index: int) -> bytes:
        rng = random.Random(f"{self._args.seed} {name} {index}")
        prompt, output = self._lengths.draw(rng)
        ids = random_prompt(rng, prompt)
        body = {"model": SERVED_NAME, "prompt": ids, "max_tokens": output, "ignore_eos": True}
        line = {"custom_id": str(index), "method": "POST", "url": ENDPOINT, "body": body}
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"

    async def _run(self, name: str, into: Measured) -> None:
        """Send people's requests, with prompts of their own."""
        trace = self._writer.write(self._people)
        result = await self._send(name, Load(name, replay_by_vllm(trace), trace))
        lengths = result["output_lens"]
        for ttft, gaps, tokens in zip(result["ttfts"], result["itls"], lengths, strict=True):
            if tokens > 1:
                into.ttft.append(ttft)
                into.tpot.append(sum(gaps) / (tokens - 1))
        into.seconds += result["duration"]
        view = await self._client.call("GET", "/admin/layout")
        into.layouts.append(" ".join(unit["layout"] for unit in view["units"]))
        say(f"{name}: {result['completed']} requests in {result['duration']:.1f} s")

    async def _send(self, name: str, load: Load) -> dict[str, Any]:
        model = self._args.out / "model"
        result = await self._vllm.run(vllm_arguments(self._address, model, load, seed_of(name)))
        failed = result.get("failed", 0)
        if failed > MAX_FAILED * result["completed"]:
            raise LoadFailedError(f"{name}: {failed} of people's requests failed")
        return result


def check_in_work(batch: openai.types.Batch) -> None:
    """Refuse a batch that is not worked on any more.

    Raises:
        RequestFailedError: it is not.
    """
    if batch.status in ("finalizing", "completed"):
        raise RequestFailedError("the batch was too small: raise --lines-per-second")
    if batch.status in ("failed", "expired"):
        raise RequestFailedError(f"the batch has {batch.status}: {batch.errors}")


def _done(batch: openai.types.Batch) -> int:
    counts = batch.request_counts
    return 0 if counts is None else counts.completed + counts.failed


def _tokens(batch: openai.types.Batch) -> int:
    return 0 if batch.usage is None else batch.usage.output_tokens


# --- what comes of it -----------------------------------------------------------------------------


def percentile_90(values: Sequence[float]) -> float | None:
    """Return the 90th percentile as ``vllm bench serve`` does, by linear interpolation."""
    return quantile(values, 0.9) if values else None


def report(results: Results) -> str:
    """Return the results as Markdown."""
    head = [
        *("way", "P90 TTFT, ms", "with the batch", "", "P90 TPOT, ms", "with the batch", ""),
        *("people's requests/s", "with the batch", "batch's lines/s", "its output tokens/s"),
    ]
    command = " ".join(results.command[3:])
    lines = [
        *("# People's latencies without a batch and with one beside them", ""),
        *(f"People: `{results.people}`. Batch: lines of `{results.batch}` tokens.", ""),
        *rows(head, [_row(name, way) for name, way in results.ways.items()]),
        *("", f"The node was ready after {results.start_seconds:.0f} s: `{command}`", ""),
    ]
    return "\n".join(lines)


def _row(name: str, way: WayFigures) -> list[str]:
    cells = [name]
    for kind in ("ttft", "tpot"):
        pair = [percentile_90(getattr(one, kind)) for one in (way.alone, way.beside)]
        cells += [ms(pair[0]), ms(pair[1]), slower(pair[1], pair[0])]
    for one in (way.alone, way.beside):
        cells.append(number(len(one.ttft) / one.seconds) if one.seconds else number(None))
    seconds = way.beside.seconds
    batch = (way.beside.lines, way.beside.line_tokens)
    return cells + [number(count / seconds) if seconds else number(None) for count in batch]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
