"""A process with vLLM imported is, but for that, like one that has just started."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.preloaded import Process
from tests.server.node import children_of


def tell(word: str) -> int:
    """Say what this process is like; what the tests run in a process."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    print("vllm" in sys.modules, threads, sorted(os.environ), tempfile.gettempdir(), word)
    return 7


def fail() -> int:
    raise ValueError("out of blocks")


def pause() -> int:
    print("paused", flush=True)
    signal.pause()
    return 0


def ask_another() -> int:
    """Start another process, say what it answers, and leave one that pauses."""
    with Process(f"{__name__}:tell", ["hello"], {"LANG": "C", "TMPDIR": "/tmp"}) as other:
        answer, _ = other.communicate(timeout=240)
    left = Process(f"{__name__}:pause", [], {})
    assert left.stdout.readline() == "paused\n"
    print(left.pid, len(children_of(os.getpid())), other.returncode, answer, flush=True)
    return pause()


@contextmanager
def process(function: str, *arguments: str, **environment: str) -> Iterator[Process]:
    with Process(f"{__name__}:{function}", arguments, environment) as started:
        try:
            yield started
        finally:
            started.kill()


def test_it_has_vllm_one_thread_and_the_environment_it_is_given(tmp_path: Path) -> None:
    with process("tell", "hello", TMPDIR=str(tmp_path), LANG="C") as started:
        output, _ = started.communicate(timeout=240)
    assert output == f"True 1 ['LANG', 'TMPDIR'] {tmp_path} hello\n"
    assert started.returncode == 7


def test_an_error_is_shown_and_is_exit_code_1() -> None:
    with process("fail") as started:
        output, _ = started.communicate(timeout=240)
    assert output.endswith("ValueError: out of blocks\n")
    assert started.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it(number: signal.Signals) -> None:
    with process("pause") as started:
        assert started.stdout.readline() == "paused\n"
        assert started.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            started.wait(timeout=0)
        started.send_signal(number)
        assert started.wait(timeout=60) == -number
        assert not Path(f"/proc/{started.pid}").exists()
        started.send_signal(number)  # to nobody: its number may be another's


def test_processes_run_side_by_side_and_one_s_end_is_not_another_s() -> None:
    with process("pause") as first, process("pause") as second:
        assert first.stdout.readline() == second.stdout.readline() == "paused\n"
        second.kill()
        assert second.wait(timeout=60) == -signal.SIGKILL
        assert first.poll() is None


def test_what_it_starts_is_forked_from_the_same_process_and_dies_with_it() -> None:
    with process("ask_another") as started, process("pause") as beside:
        left, children, code, *answer = started.stdout.readline().split(maxsplit=3)
        assert (children, code) == ("0", "7"), "it imports nothing anew to start another one"
        assert answer == ["True 1 ['LANG', 'TMPDIR'] /tmp hello\n"]
        assert Path(f"/proc/{left}").exists()
        started.kill()
        while Path(f"/proc/{left}").exists():
            pass  # bounded by the test's time limit
        assert beside.poll() is None
