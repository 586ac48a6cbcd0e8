"""How ``shoal bench traffic`` makes load: arguments of vLLM's client, and our own as a child."""

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.loadgen.bench.systems import SERVED_NAME
from shoal.loadgen.bench.traffic_tables import STATISTICS
from shoal.loadgen.bench.vllm_client import LoadFailedError
from shoal.loadgen.traces import MOONCAKE_BLOCK_TOKENS

REPLAY = (sys.executable, "-m", "shoal.server.commands.cli", "replay")
"""The command of Shoal's load generator."""


@dataclass(frozen=True, slots=True)
class Load:
    """One run of a client.

    Attributes:
        name: the name of its table.
        arguments: arguments of ``vllm bench serve`` beside those of every load; empty: our client
            replays the trace.
        trace: the file of a workload; None for a load that vLLM's client makes up.
    """

    name: str
    arguments: tuple[str, ...] = ()
    trace: Path | None = None


def replay_by_vllm(trace: Path) -> tuple[str, ...]:
    """Return the arguments of ``vllm bench serve`` that replay a trace in Mooncake's format."""
    return (
        *("--dataset-name", "timed_trace", "--dataset-path", str(trace)),
        *("--timed-trace-chunk-hash-size", str(MOONCAKE_BLOCK_TOKENS)),
        *("--timed-trace-sec-multiplier", "0.001", "--num-prompts", "1000000"),
    )


def random_load(name: str, at_once: int, number: int, prompt: int, output: int) -> Load:
    """Return requests of one length, of which so many are sent at once."""
    return Load(
        name,
        (
            *("--dataset-name", "random", "--random-input-len", str(prompt)),
            *("--random-output-len", str(output), "--num-prompts", str(number)),
            *("--max-concurrency", str(at_once)),
        ),
    )


def vllm_arguments(address: str, model: Path, load: Load, seed: int) -> list[str]:
    """Return the arguments of ``vllm bench serve`` that send a load.

    Args:
        address: the server's URL.
        model: the directory with the tokenizer.
        load: the load; it has arguments.
        seed: of its prompts.
    """
    return [
        *("--backend", "openai", "--base-url", address, "--endpoint", "/v1/completions"),
        *("--model", SERVED_NAME, "--tokenizer", str(model)),
        *("--ignore-eos", "--percentile-metrics", ",".join(STATISTICS)),
        *("--metric-percentiles", "50,90,99", "--seed", str(seed)),
        *(("--save-detailed",) if load.trace is not None else ()),
        *load.arguments,
    ]


async def replay_by_ours(address: str, trace: Path, seed: int, log: Path) -> dict[str, Any]:
    """Replay a trace by ``shoal replay``; return its file, which has the keys of vLLM's client.

    Args:
        address: the server's URL.
        trace: a trace in Mooncake's format.
        seed: prompts of other seeds are others.
        log: file that takes what the load generator prints.

    Raises:
        LoadFailedError: it made no file, or too little of the load was sent in time.
    """
    with tempfile.TemporaryDirectory() as directory, log.open("ab") as output:
        path = Path(directory) / "result.json"
        command: Sequence[str] = [
            *(*REPLAY, "--json", str(path), "--base-url", address),
            *("--model", SERVED_NAME, "--trace", str(trace), "--seed", str(seed)),
        ]
        child = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
        if await child.wait() != 0:
            raise LoadFailedError(f"shoal replay failed, see {log}")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
