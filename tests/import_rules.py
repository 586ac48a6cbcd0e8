"""Who may import whom, checked on the source: no module is run.

The rules are those of ``docs/architecture.md``. A function-level import counts like any other,
except where it matters what an import of a module brings into the process.
"""

import ast
import graphlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.sources import sources

ROOT = "shoal"
MAY_IMPORT: Mapping[str, frozenset[str]] = {
    "policies": frozenset({"policies"}),
    "runtime": frozenset({"runtime", "policies"}),
    "server": frozenset({"server", "runtime", "policies", "loadgen"}),
    "loadgen": frozenset({"loadgen"}),
    "loadgen.bench": frozenset({"loadgen.bench", "loadgen", "server", "runtime", "policies"}),
    "grafana": frozenset({"grafana"}),
}
"""Package of ``ROOT`` -> the packages of ours that its modules may import."""
FOLDERS = frozenset(package.partition(".")[0] for package in MAY_IMPORT)

BEHIND_THE_CLIENT = ("shoal.runtime.engine", "shoal.runtime.controller")
"""What the server and the benchmarks of servers reach through messages alone."""
REACH_BEHIND_IT = frozenset(
    {
        "shoal.loadgen.bench.all_to_all",
        "shoal.loadgen.bench.carry_kernel",
        "shoal.loadgen.bench.controller_loop",
        "shoal.loadgen.bench.linear_kernels",
        "shoal.loadgen.bench.linear_layers",
        "shoal.loadgen.bench.moe_kernels",
        "shoal.loadgen.bench.moving_memory",
        "shoal.loadgen.bench.tiles_to_try",
        "shoal.loadgen.bench.weight_streams",
    }
)
"""Benchmarks of what lies there, which start no server."""

MODEL_LIBRARIES = frozenset({"torch", "transformers", "triton", "vllm"})
MAY_IMPORT_MODEL_LIBRARIES = frozenset(
    {
        "shoal.loadgen.bench.all_to_all",
        "shoal.loadgen.bench.carry_kernel",
        "shoal.loadgen.bench.linear_kernels",
        "shoal.loadgen.bench.linear_layers",
        "shoal.loadgen.bench.moe_kernels",
        "shoal.loadgen.bench.moving_memory",
        "shoal.loadgen.bench.vllm_client",
        "shoal.loadgen.bench.weight_streams",
        "shoal.runtime.engine.groups.communicators",
        "shoal.runtime.engine.groups.rendezvous",
        "shoal.runtime.engine.kernels.expert_kernels",
        "shoal.runtime.engine.kernels.expert_methods",
        "shoal.runtime.engine.kernels.grouped_activation_kernel",
        "shoal.runtime.engine.kernels.mxfp4_shares",
        "shoal.runtime.engine.kernels.kv_copy_kernel",
        "shoal.runtime.engine.kernels.fp8_methods",
        "shoal.runtime.engine.kernels.library_gemms",
        "shoal.runtime.engine.kernels.linear_candidates",
        "shoal.runtime.engine.kernels.mxfp4_experts",
        "shoal.runtime.engine.kernels.partitioned_linear",
        "shoal.runtime.engine.kernels.partitioned_linear_kernel",
        "shoal.runtime.engine.kernels.words_in_memory",
        "shoal.runtime.engine.kv.cpu_pages",
        "shoal.runtime.engine.layouts.full_graphs",
        "shoal.runtime.engine.layouts.streamed_graphs",
        "shoal.runtime.engine.kv.device_copy",
        "shoal.runtime.engine.kv.host_copy",
        "shoal.runtime.engine.kv.kv_cache",
        "shoal.runtime.engine.kv.kv_lender",
        "shoal.runtime.engine.kv.kv_memory",
        "shoal.runtime.engine.kv.peer_buffers",
        "shoal.runtime.engine.kv.staged_reader",
        "shoal.runtime.engine.kv.staging_memory",
        "shoal.runtime.engine.kv.tier_memory",
        "shoal.runtime.engine.kv.vllm_pages",
        "shoal.runtime.engine.layouts.cpu_speculation",
        "shoal.runtime.engine.layouts.introductions",
        "shoal.runtime.engine.layouts.seats",
        "shoal.runtime.engine.layouts.seeded_sampling",
        "shoal.runtime.engine.layouts.told_tokens",
        "shoal.runtime.engine.layouts.writing_ahead",
        "shoal.runtime.engine.layouts.adapters",
        "shoal.runtime.engine.layouts.encoder_cache",
        "shoal.runtime.engine.layouts.engine_config",
        "shoal.runtime.engine.layouts.layout_worker",
        "shoal.runtime.engine.link.executor",
        "shoal.runtime.engine.link.seams",
        "shoal.runtime.engine.runner.arrivals",
        "shoal.runtime.engine.runner.device_memory",
        "shoal.runtime.engine.runner.drafts",
        "shoal.runtime.engine.runner.interludes",
        "shoal.runtime.engine.runner.loading",
        "shoal.runtime.engine.runner.memory_moves",
        "shoal.runtime.engine.runner.recorder",
        "shoal.runtime.engine.runner.runner",
        "shoal.runtime.engine.runner.taking_up",
        "shoal.runtime.engine.scheduler.block_holders",
        "shoal.runtime.engine.scheduler.blocks_ahead",
        "shoal.runtime.engine.scheduler.pinned_blocks",
        "shoal.runtime.engine.scheduler.arrival_messages",
        "shoal.runtime.engine.scheduler.carried_blocks",
        "shoal.runtime.engine.scheduler.carried_requests",
        "shoal.runtime.engine.scheduler.given_up_blocks",
        "shoal.runtime.engine.scheduler.grammar_backends",
        "shoal.runtime.engine.scheduler.grammar_replay",
        "shoal.runtime.engine.scheduler.kv_groups",
        "shoal.runtime.engine.scheduler.beginnings",
        "shoal.runtime.engine.scheduler.patience",
        "shoal.runtime.engine.scheduler.scheduled_steps",
        "shoal.runtime.engine.scheduler.sending",
        "shoal.runtime.engine.scheduler.step_sizes",
        "shoal.runtime.engine.scheduler.vacated_blocks",
        "shoal.runtime.engine.scheduler.vllm_backend",
        "shoal.runtime.engine.scheduler.vllm_core",
        "shoal.runtime.engine.scheduler.vllm_group_core",
        "shoal.runtime.engine.scheduler.vllm_own_core",
        "shoal.runtime.engine.sequence.capture_sizes",
        "shoal.runtime.engine.sequence.enabling",
        "shoal.runtime.engine.sequence.head_exchange",
        "shoal.runtime.engine.groups.peer_memory",
        "shoal.runtime.engine.sequence.peer_exchange",
        "shoal.runtime.engine.sequence.peer_exchange_kernel",
        "shoal.runtime.engine.sequence.piecewise_graphs",
        "shoal.runtime.engine.sequence.sequence_plan",
        "shoal.runtime.engine.sequence.step_adapters",
        "shoal.runtime.engine.sequence.ulysses",
        "shoal.runtime.engine.weights.experts_by_length",
        "shoal.runtime.engine.weights.rules.attention",
        "shoal.runtime.engine.weights.rules.dense",
        "shoal.runtime.engine.weights.rules.expert_ranges",
        "shoal.runtime.engine.weights.rules.experts",
        "shoal.runtime.engine.weights.rules.formats",
        "shoal.runtime.engine.weights.rules.fp8",
        "shoal.runtime.engine.weights.rules.fused",
        "shoal.runtime.engine.weights.rules.rule_registry",
        "shoal.runtime.engine.weights.rules.shard_rule",
        "shoal.runtime.engine.weights.rules.shards",
        "shoal.runtime.engine.weights.rules.unquantised",
        "shoal.runtime.engine.weights.rules.vocabulary",
        "shoal.runtime.engine.weights.shared_weights",
        "shoal.runtime.engine.weights.sharing.device_pages",
        "shoal.runtime.engine.weights.sharing.device_shards",
        "shoal.runtime.engine.weights.sharing.devices",
        "shoal.runtime.engine.weights.sharing.filling",
        "shoal.runtime.engine.weights.sharing.kept_parts",
        "shoal.runtime.engine.weights.sharing.pages",
        "shoal.runtime.engine.weights.sharing.shard_memory",
        "shoal.runtime.engine.weights.sharing.shared_experts",
        "shoal.runtime.engine.weights.sharing.shared_layers",
        "shoal.runtime.engine.weights.sharing.shared_store",
        "shoal.runtime.engine.weights.sharing.shared_vocabulary",
        "shoal.runtime.engine.weights.sharing.shared_weight",
        "shoal.runtime.engine.weights.sharing.slot_experts",
        "shoal.runtime.engine.weights.sharing.slot_fp8",
        "shoal.runtime.engine.weights.sharing.slot_methods",
        "shoal.runtime.engine.weights.sharing.slots",
        "shoal.runtime.engine.weights.sharing.split_linear",
        "shoal.runtime.engine.weights.sharing.stream_copier",
        "shoal.runtime.engine.weights.sharing.vocabulary_methods",
        "shoal.runtime.engine.weights.sharing.weight_keeper",
        "shoal.runtime.engine.weights.sharing.whole_weights",
        "shoal.runtime.engine.weights.store",
        "shoal.runtime.engine.weights.view_loader",
        "shoal.runtime.layout_configs",
        "shoal.server.demo.training.model",
        "shoal.server.demo.training.train",
        "shoal.server.frontend.checked_llm",
        "shoal.server.frontend.bad_outputs",
        "shoal.server.frontend.engine_client",
        "shoal.server.frontend.frontend",
        "shoal.server.frontend.grammars",
        "shoal.server.frontend.vllm_app",
        "shoal.server.options.vllm_options",
    }
)

ONLY_ON_GPUS = frozenset(
    {
        "shoal.runtime.engine.kernels.grouped_activation_kernel",
        "shoal.runtime.engine.kernels.kv_copy_kernel",
        "shoal.runtime.engine.kernels.partitioned_linear_kernel",
        "shoal.runtime.engine.kernels.words_in_memory",
        "shoal.runtime.engine.kv.device_copy",
        "shoal.runtime.engine.sequence.peer_exchange_kernel",
    }
)
"""Modules that bring Triton into the process that imports them."""

LIGHT = (
    "shoal.runtime.protocol.controller_client",
    "shoal.runtime.controller",
    "shoal.runtime.engine.agent",
    "shoal.runtime.engine.fake",
    "shoal.runtime.simulation",
)
"""Modules and packages that bring no model library into the process that imports them."""


@dataclass(frozen=True)
class Import:
    """One name that a module imports; ``eager``: when it is imported itself."""

    target: str
    line: int
    eager: bool


@dataclass
class Module:
    """One source file."""

    name: str
    package: str
    imports: list[Import] = field(default_factory=list)


def problems(modules: Mapping[str, Module]) -> list[str]:
    """Return one line per broken rule."""
    checks = (layers, model_libraries, triton, weight, cycles, names)
    return [problem for check in checks for problem in check(modules)]


def read_modules(root: Path) -> dict[str, Module]:
    """Parse every module of the known packages under ``root``, by name."""
    files = {_module_name(path.relative_to(root)): path for path in sources(root, sorted(FOLDERS))}
    known = frozenset(files)
    return {name: _read(name, path, known) for name, path in files.items()}


def layers(modules: Mapping[str, Module]) -> Iterator[str]:
    """Yield imports across folders that the folders' order forbids."""
    for module, found in _imports(modules):
        ours, theirs = _part(module.name), _part(found.target)
        if _top(found.target) in FOLDERS:
            yield f"{module.name}:{found.line}: {found.target} is {ROOT}.{found.target}"
        elif theirs in {*MAY_IMPORT, "tests"} and theirs not in MAY_IMPORT[ours]:
            yield f"{module.name}:{found.line}: {ours} may not import {theirs}"
        if (
            ours in {"server", "loadgen.bench"}
            and _within(found.target, BEHIND_THE_CLIENT)
            and module.name not in REACH_BEHIND_IT
        ):
            yield f"{module.name}:{found.line}: {ours} may not import {found.target}"


def model_libraries(modules: Mapping[str, Module]) -> Iterator[str]:
    """Yield imports of vLLM, PyTorch and the like outside the modules named for them."""
    for module, found in _imports(modules):
        library = _top(found.target)
        if library in MODEL_LIBRARIES and module.name not in MAY_IMPORT_MODEL_LIBRARIES:
            yield f"{module.name}:{found.line}: may not import {library}"


def triton(modules: Mapping[str, Module]) -> Iterator[str]:
    """Yield modules that bring Triton along, and are not named for it: nobody else may need it."""
    for name in sorted(modules.keys() - ONLY_ON_GPUS):
        way = _way_to(frozenset({"triton"}), name, modules)
        if way:
            yield f"{name}: imports triton by way of {' -> '.join(way[1:])}"


def weight(modules: Mapping[str, Module]) -> Iterator[str]:
    """Yield light modules whose import reaches a model library through others."""
    for name in sorted(modules):
        if _within(name, LIGHT):
            way = _way_to(MODEL_LIBRARIES, name, modules)
            if len(way) > 2:
                yield f"{name}: imports a model library by way of {' -> '.join(way[1:])}"


def cycles(modules: Mapping[str, Module]) -> Iterator[str]:
    """Yield an import cycle among modules, and one among folders, a folder's parent included."""
    of_modules: dict[str, set[str]] = {name: set() for name in modules}
    of_packages: dict[str, set[str]] = {module.package: set() for module in modules.values()}
    for module, found in _imports(modules):
        if found.target not in modules:
            continue
        of_modules[module.name].add(found.target)
        here, there = module.package, modules[found.target].package
        if here != there:
            of_packages[here].add(there)
    for kind, graph in (("modules", of_modules), ("folders", of_packages)):
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            yield f"import cycle of {kind}: {' -> '.join(reversed(error.args[1]))}"


def names(modules: Mapping[str, Module]) -> Iterator[str]:
    """Yield names that two files share: whoever reads one must not take it for the other."""
    seen: dict[str, str] = {}
    for module in modules.values():
        name = module.name.rpartition(".")[2]
        if module.name == module.package:
            continue
        if name in seen:
            yield f"{module.name}: {seen[name]} has that name"
        seen.setdefault(name, module.name)


_LAZY = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
"""What is inside runs later than the module. A decorator counts as inside."""

_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
"""Where imports are, unless they are calls. Most nodes of a tree are others."""
_CALLS = frozenset({"import_module", "__import__"})


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join((ROOT, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _read(name: str, path: Path, known: frozenset[str]) -> Module:
    source = path.read_text(encoding="utf-8")
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    module = Module(name, package)
    tree = ast.parse(source, str(path))
    inside = ast.AST if any(call in source for call in _CALLS) else _STATEMENTS
    waiting: list[tuple[ast.AST, bool]] = [(tree, True)]
    for node, eager in waiting:
        for target in _targets(node, package, known):
            module.imports.append(Import(target, getattr(node, "lineno", 0), eager))
        within = eager and not isinstance(node, _LAZY)
        children = ast.iter_child_nodes(node)
        waiting += [(child, within) for child in children if isinstance(child, inside)]
    return module


def _targets(node: ast.AST, package: str, known: frozenset[str]) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=base, names=names, level=level):
            if level:
                above = package.split(".")[: len(package.split(".")) - level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in known else str(base)
        case ast.Call(func=called, args=[ast.Constant(value=str(target)), *_]):
            if _called_name(called) in _CALLS:
                yield target


def _called_name(called: ast.expr) -> str | None:
    match called:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return None


def _imports(modules: Mapping[str, Module]) -> Iterator[tuple[Module, Import]]:
    for module in modules.values():
        for found in module.imports:
            yield module, found


def _way_to(libraries: frozenset[str], start: str, modules: Mapping[str, Module]) -> list[str]:
    """Return the chain of eager imports from ``start`` to one of these, or an empty list."""
    ways = [[start]]
    seen = {start}
    for way in ways:
        for found in modules[way[-1]].imports:
            if not found.eager or found.target in seen:
                continue
            seen.add(found.target)
            if _top(found.target) in libraries:
                return [*way, found.target]
            if found.target in modules:
                ways.append([*way, found.target])
    return []


def _part(name: str) -> str:
    """Return the package of ``MAY_IMPORT`` that a module is in, or the top of its name."""
    inner = name.removeprefix(f"{ROOT}.")
    parts = [part for part in MAY_IMPORT if inner != name and _within(inner, (part,))]
    return max(parts, key=len, default=_top(name))


def _top(name: str) -> str:
    return name.partition(".")[0]


def _within(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)
