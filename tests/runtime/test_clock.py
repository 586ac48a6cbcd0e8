import subprocess
import sys
import time

import pytest

from shoal.runtime.clock import ManualClock

TICK_SECONDS = 0.01
"""Of the kernel's count of when a process began."""


def test_process_seconds_count_from_the_start_of_the_process() -> None:
    code = "from shoal.runtime.clock import process_seconds as p; print(p(), p())"
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    elapsed = time.monotonic() - before
    first, second = map(float, done.stdout.split())
    assert 0 < first <= second <= elapsed + TICK_SECONDS


def test_a_manual_clock_goes_on_only() -> None:
    clock = ManualClock(3.0)
    clock.advance(2.0)
    assert clock() == 5.0
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1.0)
