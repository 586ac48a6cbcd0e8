"""Divides a GPU's memory by use, as far as a server's log and the driver tell."""

from dataclasses import dataclass

from shoal.loadgen.bench.comparison_results import Results, SystemResults
from shoal.loadgen.bench.dummy_model import kv_bytes_per_token
from shoal.loadgen.bench.system_info import GIB
from shoal.loadgen.bench.systems import STOCK_BETWEEN, STOCK_EP, STOCK_TP


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """GiB on one GPU; None where it is not known."""

    used: float | None
    weights: float | None
    kv: float | None
    graphs: float | None

    @property
    def overhead(self) -> float | None:
        """Memory that is neither weights nor KV."""
        if self.used is None or self.weights is None or self.kv is None:
            return None
        return self.used - self.weights - self.kv

    @property
    def rest(self) -> float | None:
        """Memory that is not weights, KV or graphs."""
        if self.overhead is None or self.graphs is None:
            return None
        return self.overhead - self.graphs


def kv_tokens(kept: SystemResults, degree: int) -> float | None:
    """Return the KV capacity of a unit of ``degree`` engines, in tokens.

    A server logs it for every layout that it has, and wider layouts hold more.
    """
    tokens = kept.starts[-1].get("kv_tokens") if kept.starts else None
    if not tokens:
        return None
    return float(min(tokens) if degree == 1 else max(tokens))


def gpu_memory(results: Results, system: str) -> GpuMemory | None:
    """Return the memory of the system's fullest GPU by use; None if it was not started."""
    kept = results.systems.get(system)
    if kept is None or not kept.starts:
        return None
    start, ready = kept.starts[-1], kept.memory.get("ready")
    # A GPU holds all KV bytes of a token in a layout of one engine, and its share in a wider one.
    degrees = {name: degree for degree, name in STOCK_BETWEEN.items()}
    degree = results.settings.engines if system in (STOCK_TP, STOCK_EP) else degrees.get(system, 1)
    tokens = kv_tokens(kept, degree)
    each = kv_bytes_per_token(results.config) / degree / GIB
    return GpuMemory(
        used=max(ready) if ready else None,
        weights=max(start["model_gib"], default=None),
        kv=None if tokens is None else tokens * each,
        graphs=max(start["graph_gib_by_process"].values(), default=None),
    )


def by_kind(results: Results, system: str) -> dict[str, float]:
    """Return the GiB of each kind on a system's fullest GPU; empty if its log does not tell."""
    kept, memory = results.systems.get(system), gpu_memory(results, system)
    engines = kept.starts[-1].get("phases_gib", {}).values() if kept and kept.starts else ()
    phases: dict[str, float] = max(engines, key=lambda taken: sum(taken.values()), default={})
    if not phases or memory is None or memory.kv is None:
        return {}
    kv, graphs = memory.kv, memory.graphs or 0.0
    cores = sum(gib for name, gib in phases.items() if name.endswith(" core"))
    connected = sum(gib for name, gib in phases.items() if name.endswith(" views"))
    return {
        "context": phases.get("context", 0.0),
        "communicators": phases.get("communicators", 0.0) + connected,
        "runners' buffers": phases.get("workers", 0.0),
        "weights": phases.get("weights", 0.0),
        "KV": kv,
        "graphs": graphs,
        "workspaces and torch's reserve": cores - kv - graphs,
    }
