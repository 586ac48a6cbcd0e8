"""``shoal bench switch``: times idle binds and releases, and one decode step for comparison.

It runs the same node twice through its public API: with fake engines, where only the protocol takes
time, and with real ones. Times come from one run on one machine, so compare them only with each
other. The controller measures a switch's duration, from the decision to the last member's answer.
"""

import argparse
import json
import math
import subprocess
import sys
import time
import urllib.request
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.loadgen.bench.token_client import ADMIN_PREFIX
from shoal.runtime.node.supervisor import StopRequestedError
from shoal.server.commands import serve
from shoal.server.errors import UserError
from shoal.server.number_options import check_at_least

DECODE_TOKENS = 64
"""Output tokens of the request that measures the time of one decode step."""


class Figures(msgspec.Struct, frozen=True):
    """The figures of one node. Times are in seconds."""

    system: str
    engines: int
    switches: int
    bind: dict[str, float]
    """Quantiles by name: ``p50``, ``p99``."""
    release: dict[str, float]
    decode_step: dict[str, float]
    """Time per output token at batch 1, by layout."""


def main(argv: Sequence[str]) -> int:
    """Run ``shoal bench switch`` and return the exit code.

    Raises:
        UserError: the arguments are not valid.
    """
    parser = argparse.ArgumentParser(
        prog="shoal bench switch",
        description="Time idle binds and releases. Other options are those of 'shoal serve'.",
    )
    parser.add_argument("--switches", type=int, default=200, help="binds to measure (default: 200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--system", choices=["fake", "real"], help="measure only this one")
    args, serve_argv = parser.parse_known_args(argv)
    check_at_least(args, 1, "switches")
    if args.system is not None:
        return _measure(args, serve_argv)
    figures = [_in_process_of_its_own(args, system, serve_argv) for system in ("fake", "real")]
    print(table(figures))
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
    return 0


def table(figures: Sequence[Figures]) -> str:
    """Return the figures as a table, times in milliseconds."""
    lines = [
        (
            f"{'system':<8}{'engines':>8}{'binds':>7}{'bind p50':>11}{'p99':>8}"
            f"{'release p50':>13}{'p99':>8}   one decode step"
        )
    ]
    for row in figures:
        steps = ", ".join(f"{layout} {ms(step)}" for layout, step in row.decode_step.items())
        lines.append(
            f"{row.system:<8}{row.engines:>8}{row.switches:>7}{ms(row.bind['p50']):>11}"
            f"{ms(row.bind['p99']):>8}{ms(row.release['p50']):>13}{ms(row.release['p99']):>8}"
            f"   {steps}"
        )
    return "\n".join([*lines, "times in ms; one run, one machine: compare, do not quote alone"])


def ms(seconds: float) -> str:
    """Return seconds as milliseconds with two decimals."""
    return f"{seconds * 1000:.2f}"


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return ``p50`` and ``p99`` of ``values`` by nearest rank, so each is one of the values."""
    ordered = sorted(values)
    return {
        name: ordered[math.ceil(share * len(ordered)) - 1]
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


def _in_process_of_its_own(args: Namespace, system: str, serve_argv: Sequence[str]) -> Figures:
    """Measure one system in a new process, because a process can only start one node."""
    command = [sys.executable, "-m", "shoal.server.commands.cli", "bench", "switch"]
    options = ["--system", system, "--switches", str(args.switches), *serve_argv]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, check=False, text=True)
    if done.returncode != 0:
        raise UserError(f"the node with {system} engines ended with {done.returncode}, see above")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Figures)


def _measure(args: Namespace, serve_argv: Sequence[str]) -> int:
    argv = [*serve_argv, "--port", "0", *(["--fake-engine"] if args.system == "fake" else [])]

    def on_ready(node: serve.ReadyNode) -> None:
        if node.max_group == 1:
            raise UserError("--max-group 1: there is nothing to switch")
        serve.check_measurable(node)
        figures = _measure_node(node, args.system, args.switches)
        print(msgspec.json.encode(figures).decode(), flush=True)
        raise StopRequestedError

    return serve.run(argv, on_ready, say=lambda line: print(line, file=sys.stderr))


def _measure_node(node: serve.ReadyNode, system: str, switches: int) -> Figures:
    alone = [[engine] for engine in range(node.engines)]
    width = node.max_group
    together = [list(range(first, first + width)) for first in range(0, node.engines, width)]
    decode_step = {"dp": _decode_step(node)}
    binds, releases = [], []
    for _ in range(switches):
        binds.append(_switch(node, together))
        releases.append(_switch(node, alone))
    _switch(node, together)
    decode_step[f"tp{width}"] = _decode_step(node)
    return Figures(
        system, node.engines, switches, quantiles(binds), quantiles(releases), decode_step
    )


def _switch(node: serve.ReadyNode, units: list[list[int]]) -> float:
    with _post(node, "/admin/layout", {"units": units}) as answer:
        return float(json.load(answer)["duration_seconds"])


def _decode_step(node: serve.ReadyNode) -> float:
    """Return the time per output token of one streamed request, seconds."""
    body = {
        "model": node.model,
        "prompt": "one",
        "max_tokens": DECODE_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    times: list[float] = []
    with _post(node, "/v1/completions", body) as answer:
        times.extend(time.monotonic() for line in answer if line.startswith(b"data: {"))
    return (times[-1] - times[0]) / (DECODE_TOKENS - 1)


def _post(node: serve.ReadyNode, path: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    base = node.admin if path.startswith(ADMIN_PREFIX) else node.address
    request = urllib.request.Request(f"{base}{path}", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request)
