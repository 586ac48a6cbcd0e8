"""What a runner notes of the kernels that it compiles."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shoal.runtime.protocol.compilations import CompilationNotes, compiled_lately, note_file

SECONDS = 1.5


class Triton(SimpleNamespace):
    """Triton's hooks, and a compilation that takes a look at the notes."""

    def __init__(self) -> None:
        super().__init__(jit_cache_hook=None, jit_post_compile_hook=None)

    def compile(self, path: Path) -> bool:
        """Compile a kernel; return whether the runner is seen to compile meanwhile."""
        skipped = self.jit_cache_hook(fn="kernel", already_compiled=False)
        assert not skipped, "Triton would not compile"
        seen = compiled_lately([path], 0.0)
        self.jit_post_compile_hook(fn="kernel")
        return seen


def ended_at(path: Path, wall: float) -> None:
    os.utime(path, (wall, wall))


def test_a_compilation_is_seen_while_it_goes_on_and_for_a_while_afterwards(tmp_path: Path) -> None:
    path, triton = note_file(str(tmp_path), 3), Triton()
    CompilationNotes(path).follow(triton)
    ended_at(path, 100.0)
    assert not compiled_lately([path], SECONDS, lambda: 1000.0), "it has only begun to look"
    assert triton.compile(path)
    ended_at(path, 1000.0)
    assert compiled_lately([path], SECONDS, lambda: 1001.0)
    assert not compiled_lately([path], SECONDS, lambda: 1002.0)


def test_hooks_that_were_there_are_still_called(tmp_path: Path) -> None:
    triton, called = Triton(), list[str]()

    def hook(name: str) -> Any:
        return lambda **what: called.append(f"{name} {what['fn']}")

    triton.jit_cache_hook, triton.jit_post_compile_hook = hook("before"), hook("after")
    path = note_file(str(tmp_path), 0)
    CompilationNotes(path).follow(triton)
    triton.compile(path)
    assert called == ["before kernel", "after kernel"]


def test_one_member_of_a_group_that_compiles_is_enough(tmp_path: Path) -> None:
    paths = [note_file(str(tmp_path), engine) for engine in (0, 1)]
    for path in paths:
        CompilationNotes(path)
        ended_at(path, 0.0)
    assert not compiled_lately(paths, SECONDS, lambda: 100.0)
    ended_at(paths[1], 99.0)
    assert compiled_lately(paths, SECONDS, lambda: 100.0)


def test_a_runner_that_died_while_it_compiled_is_forgotten(tmp_path: Path) -> None:
    path, triton = note_file(str(tmp_path), 0), Triton()
    assert not compiled_lately([path], SECONDS), "there is no note yet"
    CompilationNotes(path).follow(triton)
    triton.jit_cache_hook(fn="kernel")
    CompilationNotes(path)
    ended_at(path, 0.0)
    assert not compiled_lately([path], SECONDS, lambda: 100.0)
