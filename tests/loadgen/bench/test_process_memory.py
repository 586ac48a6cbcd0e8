import os
import subprocess
import sys

import pytest

from shoal.loadgen.bench.process_memory import MemoryLog, name_and_mib, slope, tree

GROWER = """
import subprocess, sys
kept = []
command = [sys.executable, "-c", "print(flush=True); input()"]
child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()  # it has grown to what it is
for line in sys.stdin:
    kept.append(b"x" * (8 << 20))
    print(child.pid, flush=True)
child.communicate(b"\\n")
"""


def test_a_tree_is_sampled_and_growth_is_seen() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GROWER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        log = MemoryLog(process.pid)
        for second in range(4):
            process.stdin.write("\n")
            process.stdin.flush()
            child = int(process.stdout.readline())
            log.sample(float(second))
        assert list(tree(process.pid)) == [process.pid, child]
        process.stdin.close()
    parent, other = log.growth()
    assert parent.process == other.process
    assert parent.last_mib - parent.first_mib == pytest.approx(24, abs=6)
    assert parent.peak_mib >= parent.last_mib
    assert parent.slope_mib_per_minute == pytest.approx(60 * 8, rel=0.3)
    assert other.slope_mib_per_minute < 60


def test_a_process_that_has_ended_has_no_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert name_and_mib(process.pid) is None
    assert list(tree(process.pid)) == [process.pid]
    own = name_and_mib(os.getpid())
    assert own is not None
    assert own[1] > 1


def test_a_step_is_no_slope_and_what_goes_on_is() -> None:
    for at in range(1, 90):
        assert slope([(float(x), 400.0 + 30.0 * (x >= at)) for x in range(90)]) == 0.0
    leak = [(float(x), 400.0 + 10.0 * (x // 7) + 30.0 * (x >= 40)) for x in range(90)]
    assert slope(leak) == pytest.approx(10 / 7, rel=0.1)


def test_the_slope_of_no_line_is_none() -> None:
    assert slope([]) == slope([(1.0, 5.0)]) == slope([(1.0, 5.0), (1.0, 9.0)]) == 0.0
    assert slope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == pytest.approx(2.0)
