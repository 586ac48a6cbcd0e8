"""``make chaos``: torment nodes, with fake and with real engines, and say what came of it."""

import os
import sys
import tempfile
from pathlib import Path

from tests.chaos.driver import ENGINES, Chaos


def main() -> int:
    """Run with ``CHAOS_ENGINE``, ``CHAOS_SEED`` and ``CHAOS_SECONDS``; return the exit code."""
    seconds = float(os.environ.get("CHAOS_SECONDS") or 900)
    seed = int(os.environ.get("CHAOS_SEED") or 0)
    chosen = os.environ.get("CHAOS_ENGINE")
    failed = False
    for engine in [chosen] if chosen else ENGINES:
        print(f"CHAOS_ENGINE={engine} CHAOS_SEED={seed} CHAOS_SECONDS={seconds:g}", flush=True)
        with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
            report = Chaos(Path(directory), engine, seed, seconds).run()
        print(report.table(), flush=True)
        failed |= bool(report.problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
