"""The report's tables of memory: what each system takes, and Shoal's by kind."""

from shoal.loadgen.bench.comparison_results import Results
from shoal.loadgen.bench.markdown import number, rows
from shoal.loadgen.bench.memory import GpuMemory, by_kind, gpu_memory
from shoal.loadgen.bench.systems import COMPARED, SHOAL, STOCK_DP

_NOTE = (
    "In use is the fullest GPU's by nvidia-smi, when ready. Weights and graphs are what vLLM logs, "
    "of all layouts; KV is the tokens' bytes. The rest is CUDA contexts, communicators, runner "
    "buffers, workspaces and what torch holds in reserve."
)
_KINDS_NOTE = (
    "By the driver, over the phases of the fullest engine's start; KV and graphs as above. "
    "Communicators are those of all layouts and of their exchanges by sequence; what connects only "
    "at its first use, and what torch keeps of the profiling runs, is with the workspaces."
)


def memory_tables(results: Results) -> list[str]:
    """Return the lines of both tables, as far as anything is known."""
    found = {name: gpu_memory(results, name) for name in COMPARED}
    measured = {name: memory for name, memory in found.items() if memory is not None}
    if not measured:
        return []
    base = measured.get(STOCK_DP)
    head = ["", "in use", "weights", "KV", "graphs", "rest", "beyond weights and KV"]
    table = rows(
        [*head, "over stock DP"],
        [_cells(name, memory, base) for name, memory in measured.items()],
    )
    return [*table, "", _NOTE, *_by_kind(results)]


def _cells(name: str, memory: GpuMemory, base: GpuMemory | None) -> list[str]:
    figures = (memory.used, memory.weights, memory.kv, memory.graphs, memory.rest, memory.overhead)
    over = None
    if base is not None and base.overhead is not None and memory.overhead is not None:
        over = memory.overhead - base.overhead
    return [name, *(number(figure) for figure in figures), number(over)]


def _by_kind(results: Results) -> list[str]:
    kinds = by_kind(results, SHOAL)
    if not kinds:
        return []
    line = [SHOAL, *(number(gib) for gib in kinds.values())]
    return ["", *rows(["", *kinds], [line]), "", _KINDS_NOTE]
