"""Workers that are killed at random moments: every line has exactly one result in the end.

``SHOAL_BATCH_KILLS`` is the number of kills; ``SHOAL_BATCH_SEED`` is that of their
moments. ``make chaos`` asks for 1,000 kills.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from shoal.server.batch.batch_objects import Batch, Status
from shoal.server.batch.batch_store import BatchStore
from tests.server.batch.batches import named, results

KILLS = int(os.environ.get("SHOAL_BATCH_KILLS", "40"))
SEED = int(os.environ.get("SHOAL_BATCH_SEED", "1"))
LINES = 200

RUN = """
import json, sys, pathlib
from tests.server.batch.kills import run
found, kills = run(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
print(json.dumps({"kills": kills, "batches": [[one.owner, one.id] for one in found]}))
"""


def killed(directory: Path, kills: int, seed: int) -> tuple[list[Batch], int]:
    """Run ``kills.run`` in a process without threads, which can fork."""
    command = [sys.executable, "-c", RUN, str(directory), str(kills), str(LINES), str(seed)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    told = json.loads(done.stdout.splitlines()[-1])
    store = BatchStore(directory)
    batches = [store.batch(owner, name) for owner, name in told["batches"]]
    store.close()
    return [one for one in batches if one is not None], told["kills"]


def test_every_line_is_answered_exactly_once(tmp_path: Path) -> None:
    batches, kills = killed(tmp_path, KILLS, SEED)
    assert kills == KILLS
    assert len(batches) >= 2
    store = BatchStore(tmp_path)
    for batch in batches:
        assert batch.status is Status.COMPLETED
        assert (batch.total, batch.completed + batch.failed) == (LINES, LINES)
        assert results(store, batch) == {one["custom_id"]: 1 for one in named(LINES)}
        assert batch.failed == LINES // 10
    known = {name for one in batches for name in (one.output_file_id, one.error_file_id)}
    known |= {one.input_file_id for one in batches}
    assert {path.name for path in store.path("x").parent.iterdir()} == known
    store.close()
