"""The kernel that reads KV from peers' memory, through Triton's interpreter."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from shoal.policies.values.layouts import alone
from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kernels import kv_copy_kernel
from shoal.runtime.engine.kv.carry_plan import Numbers
from shoal.runtime.engine.kv.device_copy import DeviceCopier, Launch, launches
from shoal.runtime.engine.kv.kv_memory import HeldBuffer
from shoal.runtime.engine.kv.kv_reader import KvReader
from shoal.runtime.engine.kv.portions import Copy, Portion
from tests.depth import DEEP
from tests.runtime.engine.kv.carried_kv import CASES, GROUP, WIDE, Case, Engines
from tests.runtime.engine.kv.test_kv_reader import Neighbours

INTERPRETER = threading.Lock()
"""Triton's interpreter replaces parts of Triton while it runs: it serves one thread at a time."""
KERNEL, WORDS = kv_copy_kernel._copy_kernel, kv_copy_kernel.words


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_copy_kernel, "_copy_kernel", InterpretedFunction(KERNEL.fn))
    monkeypatch.setattr(kv_copy_kernel, "words", InterpretedFunction(WORDS.fn))


class InterpretedCopier:
    """Does on the host what ``DeviceCopier`` does on a GPU.

    Args:
        programs: most programs of a launch.
        spoil: changes what the kernel is told.
    """

    def __init__(
        self,
        programs: int,
        spoil: Callable[[Launch], Launch] = lambda launch: launch,
    ) -> None:
        self._programs, self._spoil = programs, spoil
        self.count = 0

    def after_steps(self, *, beside: bool) -> Copy:
        return self._copy

    def at_once(self) -> Copy:
        return self._copy

    def _copy(
        self, portions: Sequence[Portion], table: Numbers | None = None
    ) -> Callable[[], float]:
        for launch in (each for portion in portions for each in launches(portion)):
            numbers, *arguments = self._spoil(launch)
            with INTERPRETER:
                kv_copy_kernel.copy(numbers.ctypes.data, *arguments, programs=self._programs)
            self.count += 1
        return lambda: 0.0

    def settle(self) -> None:
        pass


def read(
    case: Case, programs: int = 3, spoil: Callable[[Launch], Launch] = lambda launch: launch
) -> bool:
    """Return whether all members of the target get what they are to have, and nothing else."""
    engines, right = Engines(case), []
    for engine in case.target.engines:
        expected, own = engines.expected(engine), HeldBuffer(engines.buffers[engine])
        assert not own.bytes.equal(expected)
        copier = InterpretedCopier(programs, spoil)
        peers = Neighbours(engines.buffers)
        reader = KvReader(engine, case.max_sp, [case.pages], own, peers, copier)
        reader.read(case.source, case.target, engines.requests)()
        stages = max(1, case.source.layout.pp // case.target.layout.pp)
        assert copier.count == stages, "one launch for the layers of each stage"
        right.append(own.bytes.equal(expected))
    return all(right)


NAMES = (
    list(CASES)
    if DEEP
    else [
        *("DP to TP2", "TP2 to DP, NHD", "TP2 to TP4", "SP2 of TP4 to DP", "TP2 to SP4 of TP8"),
        *("more members than heads", "the same heads twice", "blocks outermost"),
        *("blocks that kernels divide, back", "DP to PP2", "TP2 x PP2 to PP4, NHD"),
    ]
)
"""``test_kv_reader.py`` has the others without the kernel, which takes long when interpreted."""


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", NAMES)
def test_it_copies_what_a_member_is_to_hold_and_nothing_else(name: str) -> None:
    assert read(CASES[name])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("head_major", [True, False])
@pytest.mark.parametrize(
    ("token_bytes", "tile"), [(16, 8), (48, 64), (96, 2048), (512, 64), (1024, 256)]
)
def test_rows_may_be_of_any_size_and_tiles_too(
    token_bytes: int, tile: int, head_major: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also rows that are no power of two, and tiles larger and smaller than a run."""
    monkeypatch.setattr(kv_copy_kernel, "_TILE_WORDS", tile)
    spans = ((3, 9), (0, 5))
    assert read(Case(alone(0), GROUP, token_bytes=token_bytes, head_major=head_major, spans=spans))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("programs", [1, 7, 1000])
def test_any_number_of_programs_copies_all(programs: int) -> None:
    assert read(Case(WIDE, alone(1)), programs)


def without_a_run(launch: Launch) -> Launch:
    """Return a launch in which one run names no rows."""
    numbers = launch.numbers.copy()
    numbers[2 * launch.runs] = 0
    return launch._replace(numbers=numbers)


WRONG = {
    "a run is left out": without_a_run,
    "a layer is left out": lambda launch: launch._replace(layers=launch.layers - 1),
    "heads and tokens are mixed up": lambda launch: launch._replace(heads=1),
    "heads are elsewhere": lambda launch: launch._replace(
        strides=launch.strides._replace(source_head=launch.strides.source_head + 16)
    ),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("spoil", WRONG.values(), ids=list(WRONG))
def test_what_is_wrong_is_found(spoil: Callable[[Launch], Launch]) -> None:
    """What the comparison of the tests above says of a kernel that is told something else."""
    case = replace(CASES["DP to TP2, NHD"], spans=((0, 8),))
    assert read(case)
    assert not read(case, spoil=spoil)


def test_pages_that_the_kernel_cannot_copy_are_refused() -> None:
    engines = Engines(Case(alone(0), GROUP, token_bytes=8))
    own = HeldBuffer(engines.buffers[0])
    with pytest.raises(NotSharedError, match="a token's KV takes 8 bytes of a head"):
        DeviceCopier(own, [engines.case.pages])


@pytest.mark.parametrize("row_bytes", [512, 320])
def test_it_compiles_for_a_gpu_and_reads_sixteen_bytes_at_once(
    row_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    numbers = {*KERNEL.arg_names} - {"row_words", "tile_words", "tile_rows"}
    assert set(KERNEL.do_not_specialize) == numbers
    types = {argument: "i64" if argument == "table" else "i32" for argument in numbers}
    words = row_bytes // kv_copy_kernel.WORD_BYTES
    tile_words = triton.next_power_of_2(words)
    rows = kv_copy_kernel._TILE_WORDS // tile_words
    constants = {"row_words": words, "tile_words": tile_words, "tile_rows": rows}
    signature = {name: types.get(name, "constexpr") for name in KERNEL.arg_names}
    source = ASTSource(KERNEL, signature, constants)
    options = {"num_warps": kv_copy_kernel._WARPS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]
    assert "ld.global.v2.b64" in compiled.asm["ptx"]
