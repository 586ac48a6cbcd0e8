"""Values of several processes in shared files. In processes of their own: the mode is for ever."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
from pathlib import Path
from shoal.server.operator.multiprocess_metrics import share_metrics

share_metrics(Path(sys.argv[1]))
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

asked = 0
getpid = os.getpid
def counted():
    global asked
    asked += 1
    return getpid()
os.getpid = counted

counter = Counter("tokens", "Tokens.", registry=CollectorRegistry())
for _ in range(100):
    counter.inc()
in_parent = asked
if os.fork() == 0:
    counter.inc(5)
    os._exit(0)
os.wait()
counter.inc()
everything = CollectorRegistry()
MultiProcessCollector(everything, sys.argv[1])
print(in_parent, len(list(Path(sys.argv[1]).glob("counter_*.db"))))
print(generate_latest(everything).decode())
"""


def test_processes_add_up_and_ask_for_their_ids_once(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "prometheus"
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    first, *page = ran.stdout.splitlines()
    # A forked process has a file of its own: it does not write over its parent's numbers.
    assert first == "0 2"
    assert "tokens_total 106.0" in page
