"""The systems that are compared: how each is started, and in which layouts it is measured."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec

from shoal.policies.shift import DEFAULT_THRESHOLD

SERVED_NAME = "bench"
PORT = "{port}"
"""Stands for the server's port in a command."""
ADMIN_PORT = "{admin_port}"
"""The same for Shoal's admin API."""

STOCK_DP, STOCK_TP, SHOAL, CHECK = "stock-dp", "stock-tp", "shoal", "shoal-check"
"""Names of the systems. The last one serves a real checkpoint, only for numerics."""
STOCK_BETWEEN = {2: "stock-tp2", 4: "stock-tp4"}
"""Stock vLLM in replicas of several GPUs each, by the replicas' degree of TP."""
STOCK_EP = "stock-ep"
"""As ``STOCK_TP``, but each GPU has whole experts instead of a share of every expert."""
COMPARED = (STOCK_DP, *STOCK_BETWEEN.values(), STOCK_TP, STOCK_EP, SHOAL)
CHECK_MODEL_LEN = 1024
"""Longest context of the real checkpoint: small models allow only a few thousand tokens."""


class Settings(msgspec.Struct, frozen=True):
    """The settings with which all servers are started."""

    shape: str
    """The shape's name, as the user gave it."""
    engines: int
    """GPUs of the node."""
    dtype: str
    quantization: str | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    prefix_caching: bool
    api_servers: int
    options: tuple[str, ...]
    """More options for every server."""
    shoal_options: tuple[str, ...] = ()
    """More options, only for Shoal."""
    degrees: tuple[int, ...] = ()
    """Degrees of TP between one engine and all engines that are measured, too."""


@dataclass(frozen=True, slots=True)
class Layout:
    """An arrangement of a system's units while it is measured."""

    name: str
    """``dp`` or ``tp<p>``."""
    units: tuple[tuple[int, ...], ...]
    """Engines of every unit."""
    pinned: bool = False
    """Whether requests can be sent to a unit, by its rank; otherwise the server places them."""

    @property
    def partition(self) -> list[list[int]]:
        """The units as ``POST /admin/layout`` takes them."""
        return [list(unit) for unit in self.units]


@dataclass(frozen=True, slots=True)
class System:
    """One server."""

    name: str
    command: tuple[str, ...]
    """The command, in which ``PORT`` stands for the port."""
    layouts: tuple[Layout, ...]
    """Its layouts; it starts in the first."""
    switches: bool = False
    """Whether it can change its layout, as Shoal can."""
    recording_dir: Path | None = None
    """Where its runners record what their devices do, if they can."""

    @property
    def shifts(self) -> bool:
        """Whether its groups may take steps as SP."""
        return self.max_sp > 1

    @property
    def max_sp(self) -> int:
        """Largest degree of SP."""
        return int(self._option("--max-sp") or 1)

    @property
    def shift_threshold(self) -> int | str:
        """The threshold with which the server was started: tokens, or a rule.

        Any other value is returned as it is, and the server refuses it.
        """
        value = self._option("--shift-threshold")
        if value is None:
            return DEFAULT_THRESHOLD
        return int(value) if value.isdecimal() else value

    @property
    def regroups(self) -> bool:
        """Whether it can change its layout, and has engines enough to do so."""
        return self.switches and len(self.layouts[0].units) > 1

    @property
    def caches_prefixes(self) -> bool:
        """Whether it was started with vLLM's prefix caching."""
        return "--enable-prefix-caching" in self.command

    def _option(self, name: str) -> str | None:
        return last_value(self.command, name)

    @property
    def ready_path(self) -> str:
        """Route that answers 200 once the server takes requests."""
        return "/ready" if self.switches else "/health"

    def argv(self, port: int, admin_port: int) -> list[str]:
        """Return the command that serves on ``port``, with the admin API on ``admin_port``."""
        ports = {PORT: str(port), ADMIN_PORT: str(admin_port)}
        return [ports.get(word, word) for word in self.command]


def last_value(words: Sequence[str], name: str) -> str | None:
    """Return the value of an option in a command; if it is repeated, the last value counts."""
    found = None
    for word, following in pairwise((*words, "")):
        key, _, value = word.partition("=")
        if key == name:
            found = value or following
    return found


def dp_layout(engines: int, *, pinned: bool) -> Layout:
    """Return the layout in which every engine is alone."""
    return Layout("dp", tuple((engine,) for engine in range(engines)), pinned and engines > 1)


def tp_layout(engines: int, degree: int | None = None, *, pinned: bool = False) -> Layout:
    """Return the layout in which all engines are one unit, or units of ``degree`` engines each."""
    degree = degree or engines
    units = tuple(tuple(range(i, i + degree)) for i in range(0, engines, degree))
    return Layout(f"tp{degree}", units, pinned and len(units) > 1)


def recording(system: System, directory: Path) -> System:
    """Return Shoal started so that its runners can record, into a directory that exists."""
    command = (*system.command, "--recording-dir", str(directory))
    return replace(system, command=command, recording_dir=directory)


def all_systems(
    settings: Settings, model: str, check_model: str | None = None, *, experts: bool = False
) -> list[System]:
    """Return the systems in the order in which they are measured.

    Args:
        settings: the settings of all systems.
        model: directory of the model with dummy weights.
        check_model: directory of a real checkpoint, on which Shoal's layouts should agree.
        experts: whether the model has experts, so that ``STOCK_EP`` is one of the systems.
    """
    engines = settings.engines
    dummy = ["--load-format", "dummy", *_quantization(settings)]
    check = ["--max-model-len", str(CHECK_MODEL_LEN)]
    between = [tp_layout(engines, degree) for degree in settings.degrees]
    shoal_layouts = (dp_layout(engines, pinned=False), *between, tp_layout(engines))
    found = [
        System(
            STOCK_DP,
            _stock(settings, model, [*dummy, "--data-parallel-size", str(engines)]),
            (dp_layout(engines, pinned=True),),
        ),
        *(_replicas(settings, model, dummy, degree) for degree in settings.degrees),
        *(
            System(name, _stock(settings, model, [*dummy, *options]), (tp_layout(engines),))
            for name, options in _whole(engines, experts).items()
        ),
        System(SHOAL, _shoal(settings, model, dummy), shoal_layouts, switches=True),
    ]
    if check_model is not None:
        found.append(
            System(CHECK, _shoal(settings, check_model, check), shoal_layouts, switches=True)
        )
    return found


def _whole(engines: int, experts: bool) -> dict[str, list[str]]:
    """Return the options of the stock systems that are one unit of all GPUs, by name."""
    degree = ["--tensor-parallel-size", str(engines)]
    found = {STOCK_TP: degree}
    return {**found, STOCK_EP: [*degree, "--enable-expert-parallel"]} if experts else found


def _replicas(settings: Settings, model: str, own: Sequence[str], degree: int) -> System:
    """Return stock vLLM in replicas of ``degree`` GPUs each."""
    replicas = str(settings.engines // degree)
    sizes = ["--tensor-parallel-size", str(degree), "--data-parallel-size", replicas]
    layout = tp_layout(settings.engines, degree, pinned=True)
    return System(STOCK_BETWEEN[degree], _stock(settings, model, [*own, *sizes]), (layout,))


def _stock(settings: Settings, model: str, own: Sequence[str]) -> tuple[str, ...]:
    run = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    # As in Shoal: urgent requests go first, and requests of one priority keep their order.
    priority = ["--scheduling-policy", "priority"]
    return (*run, *_common(settings), *own, *priority, *settings.options)


def _shoal(settings: Settings, model: str, own: Sequence[str]) -> tuple[str, ...]:
    run = [sys.executable, "-m", "shoal.server.commands.cli", "serve", model, "--policy", "manual"]
    # This is Shoal's default on GPUs; it is given here because the figures depend on it.
    largest = last_value(settings.shoal_options, "--max-group") or str(settings.engines)
    engines = ["--engines", str(settings.engines), "--admin-port", ADMIN_PORT, "--max-sp", largest]
    return (
        *(*run, *_common(settings), *own, *engines),
        *(*settings.options, *settings.shoal_options),
    )


def _quantization(settings: Settings) -> list[str]:
    return ["--quantization", settings.quantization] if settings.quantization else []


def _common(settings: Settings) -> list[str]:
    caching = "" if settings.prefix_caching else "no-"
    return [
        *("--host", "127.0.0.1", "--port", PORT, "--served-model-name", SERVED_NAME),
        *("--api-server-count", str(settings.api_servers), "--dtype", settings.dtype),
        *("--max-model-len", str(settings.max_model_len)),
        *("--max-num-seqs", str(settings.max_num_seqs)),
        *("--max-num-batched-tokens", str(settings.max_num_batched_tokens)),
        *("--gpu-memory-utilization", f"{settings.gpu_memory_utilization:g}"),
        *("--seed", "0", "--disable-uvicorn-access-log", f"--{caching}enable-prefix-caching"),
    ]
