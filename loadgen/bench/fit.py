"""``shoal bench fit``: fits a hardware file to the results of ``shoal bench gpu``.

The fit uses the times of single units in these results, from stock vLLM and Shoal: TPOT by batch,
and TTFT by prompt. It also uses the TTFTs in SP that show how much host time a step by sequence
takes, and the times of the copies of KV for requests that switches carried. The simulator and the
policies use the file to predict such nodes.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from shoal.loadgen.bench.carry_measure import CARRY
from shoal.loadgen.bench.comparison_results import Results
from shoal.loadgen.bench.measures import decode_context
from shoal.loadgen.bench.modes import MODES
from shoal.loadgen.bench.steps import MESSAGES, table
from shoal.loadgen.bench.systems import COMPARED, SHOAL, STOCK_EP, System
from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.config import FULL_GRAPH_TOKENS
from shoal.runtime.simulation import calibration
from shoal.runtime.simulation.calibration import Copy, Sample, predicted
from shoal.runtime.simulation.shape_files import FileError, ShapeFile, read_hardware, read_shape
from shoal.server.errors import UserError
from shoal.server.files import write_file

FITTED = (*(name for name in calibration.FITTED if name != "message_seconds"), "front_seconds")
"""Message times are measured by switches; the rest of a first token's time is its step's."""


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
    copies = [copy for each in results for copy in copies_of(each)]
    hardware = start
    if args.output is not None:
        hardware = calibration.fit(shape, samples, start, FITTED)
        if in_sp:
            hardware = calibration.fit_sp_host(shape, hardware, in_sp)
        if copies:
            hardware = calibration.fit_copies(hardware, copies)
        write_file(args.output, msgspec.json.format(msgspec.json.encode(hardware)) + b"\n")
    samples += in_sp
    print(table(shape, hardware, samples))
    errors = [abs(predicted(shape, hardware, s) / s.seconds - 1) for s in samples]
    print(f"error: mean {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}")
    for copy in copies:
        seconds = calibration.copy_seconds(hardware, copy)
        print(
            f"a copy of {copy.bytes / 1e6:.1f} MB: predicted {seconds * 1e3:.2f} ms, "
            f"measured {copy.seconds * 1e3:.2f} ms"
        )
    return 0


def samples_of(results: Results) -> Iterator[Sample]:
    """Yield the measured times of single units, for every system and layout."""
    context = decode_context(results.sizes.decode_tokens)
    for name in (name for name in COMPARED if name != STOCK_EP):  # the model knows shares alone
        for layout, found in results.found(name, "decode").items():
            for count, figures in found.items():
                batch = Batch(int(count), int(count) * context)
                yield Sample(_formed(layout), (batch,), figures["tpot"])
        for layout, found in results.found(name, "prefill").items():
            for prompt, figures in found.items():
                steps = tuple(_steps(int(prompt), results.settings.max_num_batched_tokens))
                yield Sample(_formed(layout), steps, figures["ttft"], MESSAGES)


def sp_host_samples_of(results: Results) -> Iterator[Sample]:
    """Yield the TTFTs in SP of prompts whose only step apparently waited for the host.

    Such a step was no faster than TP's step for the same prompt. If there are enough tokens for
    their arithmetic to matter, only the host explains that. Prompts with no more tokens than a CUDA
    graph are left out, because their step ran in TP.
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
            one = len(steps) == 1 and steps[0].tokens > FULL_GRAPH_TOKENS
            if one and seconds >= in_tp[prompt]:
                yield Sample(Layout(tp=degree), steps, seconds, MESSAGES, min(sp, degree))


def copies_of(results: Results) -> Iterator[Copy]:
    """Yield the mean copy of each number and length of requests that switches carried.

    A member reads from, or is read by, an engine alone: so each copy has one link. Requests of
    which all but the last tokens went ahead have small copies.
    """
    measures = results.systems[SHOAL].measures if SHOAL in results.systems else {}
    for name, found in measures.items():
        copied = found.get("copies") if name.startswith(CARRY) else None
        if copied and all(copied.values()):
            yield Copy(copied["bytes"] / copied["count"], copied["seconds"] / copied["count"])


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
