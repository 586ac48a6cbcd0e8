"""``shoal bench fit``: the hardware file that fits the results of ``shoal bench gpu``.

Takes the times of single units that these hold, stock vLLM's and Shoal's: TPOT by batch, and TTFT
by prompt; and of TTFT in SP those that tell what a step by sequence takes of the host. The
simulator and the policies then predict such nodes from the file.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from shoal.loadgen.bench.comparison_results import Results
from shoal.loadgen.bench.modes import MODES
from shoal.loadgen.bench.steps import MESSAGES, table
from shoal.loadgen.bench.systems import COMPARED, SHOAL, System
from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.simulation import calibration
from shoal.runtime.simulation.calibration import Sample, predicted
from shoal.runtime.simulation.shape_files import FileError, ShapeFile, read_hardware, read_shape
from shoal.runtime.simulation.simulated_node import CAPTURED_TOKENS
from shoal.server.errors import UserError
from shoal.server.files import write_file

FITTED = (*(name for name in calibration.FITTED if name != "message_seconds"), "prefill_seconds")
"""A switch tells what messages take. What else there is to a first token is its step's."""


def main(argv: Sequence[str]) -> int:
    """Run ``shoal bench fit`` and return the exit code.

    Raises:
        UserError: the arguments, or a file that they name, are not valid.
    """
    parser = argparse.ArgumentParser(
        prog="shoal bench fit", description="Fit a hardware file to results of 'shoal bench gpu'."
    )
    add = parser.add_argument
    add("results", type=Path, nargs="+", metavar="RESULTS", help="results.json of such a run")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="the hardware file to write (default: none: say how far --start is from the results)",
    )
    add("--model-shape", required=True, metavar="FILE|NAME", help="shape of the measured model")
    add("--start", default="h200", metavar="FILE|NAME", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        shape, start = read_shape(args.model_shape), read_hardware(args.start)
    except FileError as error:
        raise UserError(str(error)) from error
    results = [_read(path, shape) for path in args.results]
    samples = [sample for each in results for sample in samples_of(each)]
    if not samples:
        raise UserError("the results hold no time of a step: measure decode or prefill")
    in_sp = [sample for each in results for sample in sp_host_samples_of(each)]
    hardware = start
    if args.output is not None:
        hardware = calibration.fit(shape, samples, start, FITTED)
        if in_sp:
            hardware = calibration.fit_sp_host(shape, hardware, in_sp)
        write_file(args.output, msgspec.json.format(msgspec.json.encode(hardware)) + b"\n")
    samples += in_sp
    print(table(shape, hardware, samples))
    errors = [abs(predicted(shape, hardware, s) / s.seconds - 1) for s in samples]
    print(f"error: mean {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}")
    return 0


def samples_of(results: Results) -> Iterator[Sample]:
    """Yield the times of single units, of every system and layout."""
    tokens = results.sizes.decode_tokens
    # Between the half and seven eighths of the output (``decode_seconds``), a request has so many.
    context = tokens + tokens * 11 // 16
    for name in COMPARED:
        for layout, found in results.found(name, "decode").items():
            for count, figures in found.items():
                batch = Batch(int(count), int(count) * context)
                yield Sample(_formed(layout), (batch,), figures["tpot"])
        for layout, found in results.found(name, "prefill").items():
            for prompt, figures in found.items():
                steps = tuple(_steps(int(prompt), results.settings.max_num_batched_tokens))
                yield Sample(_formed(layout), steps, figures["ttft"], MESSAGES)


def sp_host_samples_of(results: Results) -> Iterator[Sample]:
    """Yield the TTFTs in SP of prompts whose one step waited for the host, as far as one can see.

    That step was no faster than TP's of the same prompt, which only the host explains once there
    are enough tokens for their arithmetic to count. With no more tokens than a CUDA graph has, it
    was run in TP.
    """
    found = results.found(SHOAL, MODES)
    if not found:
        return
    sp = System(SHOAL, tuple(results.systems[SHOAL].command), ()).max_sp
    for way in found:
        if not way.startswith("sp"):
            continue
        degree = int(way.removeprefix("sp"))
        in_tp = found[f"tp{degree}"]["ttft"]
        for prompt, seconds in found[way]["ttft"].items():
            steps = tuple(_steps(int(prompt), results.settings.max_num_batched_tokens))
            one = len(steps) == 1 and steps[0].tokens > CAPTURED_TOKENS
            if one and seconds >= in_tp[prompt]:
                yield Sample(Layout(tp=degree), steps, seconds, MESSAGES, min(sp, degree))


def _steps(prompt: int, most: int) -> Iterator[Batch]:
    """Yield the steps of a prompt that is computed in chunks of at most ``most`` tokens."""
    for begin in range(0, prompt, most):
        tokens = min(most, prompt - begin)
        yield Batch(prefill_tokens=tokens, prefill_context=begin + math.ceil(tokens / 2))


def _formed(name: str) -> Layout:
    return DP if name == "dp" else Layout(tp=int(name.removeprefix("tp")))


def _read(path: Path, shape: ShapeFile) -> Results:
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: {error}") from error
    measured = (results.config.get("num_hidden_layers"), results.config.get("hidden_size"))
    if measured != (shape.layers, shape.hidden):
        raise UserError(f"{path} is of another model than the shape")
    return results
