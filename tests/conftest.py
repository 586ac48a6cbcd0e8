"""Settings of every test: no network, one thread per model, no clock, the same draws each time."""

import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Read by vLLM and PyTorch when they are imported, so they must be set before any test module.
os.environ.update(
    HF_HUB_OFFLINE="1",
    # Numba would compile vLLM's search for n-grams in each engine, for longer than it searches.
    NUMBA_DISABLE_JIT="1",
    NUMBA_NUM_THREADS="1",  # it sets OpenMP's, where n-grams are searched for
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    # Without this, PyTorch asks the compiler for each of the processor's vector instructions: it
    # compiles programs for each cache, and runs them in each process that compiles anything.
    TORCHINDUCTOR_VEC_ISA_OK="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
)

REAL = "real"
"""The word in the name of a file or function whose tests run real engines."""

REAL_TOO = "other real engines"
"""The second half of the modules with real engines: see ``process_of``."""

HALF = (
    "tests/server",
    "tests/runtime/engine/test_real_r",
    "tests/runtime/engine/test_real_s",
    "tests/runtime/engine/test_real_t",
)
"""How the paths of the second half begin."""

PROGRAMS = "tests/runtime/engine/test_real_v2"
"""How modules are called whose programs begin with vLLM imported in another way. They share a
process, and need not wait for other real engines."""

LONG = (
    REAL_TOO,
    REAL,
    PROGRAMS,
    "tests/server/test_schemathesis.py",
    "tests/models/test_models_page.py",
    "tests/runtime/engine/sequence/test_head_exchange.py",
    "tests/loadgen/bench/test_carry_measure.py",
    "tests/server/options/test_failure_options.py",
    "tests/loadgen/bench/test_campaign.py",
    "tests/loadgen/bench/test_traffic.py",
    "tests/test_wheel.py",
    "tests/runtime/test_random_switches.py",
    "tests/runtime/simulation/test_simulated_node.py",
    "tests/server/commands/test_replay.py",
    "tests/loadgen/bench/test_engine_failures.py",
)
"""What processes are given first, as ``process_of`` names it: begun last, one of these would keep
one process at work for minutes after the other has ended."""

_numbers = itertools.count()

settings.register_profile("shoal", deadline=None, derandomize=True, database=None, max_examples=40)
settings.register_profile("quick", settings.get_profile("shoal"), max_examples=15)  # make quick
settings.register_profile("deep", settings.get_profile("shoal"), max_examples=300)
# As ``tests/depth.py`` says, which this module does not import: its tests run it alone.
settings.load_profile("deep" if os.environ.get("SHOAL_TESTS") == "all" else "shoal")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests with real engines, which their names tell, and put the long ones first."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(process_of(item.nodeid), len(LONG)))
    for item in items:
        if is_real(item.nodeid):
            item.add_marker(pytest.mark.real)


def pytest_collection_finish() -> None:
    """Have the garbage collector leave alone what was imported and collected.

    It would look at a million objects for seconds wherever a test has it collect, and five times at
    the end of each process, where pytest looks for errors in what tests have left.
    """
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a module in one process, and in two of them nearly all with real engines.

    Not by ``--dist loadgroup``: pytest-xdist 3.8 loses all groups under pytest 9.2, in silence.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return process_of(nodeid)

    config.option.loadscopereorder = False  # to most tests first, which are the short ones
    return Scheduling(config, log)


def process_of(nodeid: str) -> str:
    """Return what a test shares a process with: tests of the same name here run in one."""
    module, _, _ = nodeid.partition("::")
    if module.startswith(PROGRAMS):
        return PROGRAMS
    if is_real(nodeid):
        return REAL_TOO if module.startswith(HALF) else REAL
    return module


def is_real(nodeid: str) -> bool:
    """Return whether a test runs real engines."""
    module, _, name = nodeid.partition("::")
    return REAL in Path(module).stem.split("_") + name.partition("[")[0].split("_")


@pytest.fixture(scope="session", autouse=True)
def shared_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have vLLM and PyTorch keep for the next test what they learn and compile in one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm")))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def private_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep whatever follows XDG in a directory of the test's own.

    It is made only if something is kept. It is not in ``tmp_path``, which few tests need: to make
    one, pytest looks at those of all tests before it.
    """
    directory = tmp_path_factory.getbasetemp() / f"cache-{next(_numbers)}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
