"""``make chaos``: torment nodes, with fake and with real engines, and say what came of it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.chaos.batch_kills import kill_nodes
from tests.chaos.driver import ENGINES, Chaos

NODE_KILLS = {"fake": 1000, "real": 20}
"""Unless ``CHAOS_NODE_KILLS`` says otherwise; a real engine takes long to start again."""


def main() -> int:
    """Run with ``CHAOS_ENGINE``, ``CHAOS_SEED`` and ``CHAOS_SECONDS``; return the exit code."""
    seconds = float(os.environ.get("CHAOS_SECONDS") or 900)
    seed = int(os.environ.get("CHAOS_SEED") or 0)
    chosen = os.environ.get("CHAOS_ENGINE")
    failed = not _kills_batch_workers(seed)
    for engine in [chosen] if chosen else ENGINES:
        failed |= not _kills_nodes(engine, seed)
        failed |= not _torments_node(engine, seed, seconds)
    return int(failed)


def _kills_batch_workers(seed: int) -> bool:
    """Kill workers of batches, ``CHAOS_BATCH_KILLS`` times, and return whether nothing was lost."""
    kills = os.environ.get("CHAOS_BATCH_KILLS") or "1000"
    print(f"CHAOS_BATCH_KILLS={kills}", flush=True)
    if kills == "0":
        return True
    told = {"SHOAL_BATCH_KILLS": kills, "SHOAL_BATCH_SEED": str(seed)}
    test = ["--timeout", "0", "tests/server/batch/test_kills.py"]
    command = [sys.executable, "-m", "pytest", "-q", *test]
    return subprocess.run(command, env=os.environ | told, check=False).returncode == 0


def _kills_nodes(engine: str, seed: int) -> bool:
    """Kill nodes during batches, ``CHAOS_NODE_KILLS`` times; return whether nothing was lost."""
    kills = int(os.environ.get("CHAOS_NODE_KILLS") or NODE_KILLS[engine])
    print(f"CHAOS_ENGINE={engine} CHAOS_SEED={seed} CHAOS_NODE_KILLS={kills}", flush=True)
    if kills == 0:
        return True
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        report = kill_nodes(Path(directory), engine, seed, kills)
    print(report.table(), flush=True)
    return not report.problems


def _torments_node(engine: str, seed: int, seconds: float) -> bool:
    """Torment a node, for ``CHAOS_SECONDS``, and return whether nothing was wrong with it."""
    print(f"CHAOS_ENGINE={engine} CHAOS_SEED={seed} CHAOS_SECONDS={seconds:g}", flush=True)
    if seconds == 0:
        return True
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        report = Chaos(Path(directory), engine, seed, seconds).run()
    print(report.table(), flush=True)
    return not report.problems


if __name__ == "__main__":
    sys.exit(main())
