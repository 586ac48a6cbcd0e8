"""vLLM's own load generator, ``vllm bench serve``, in a process that runs one load after another.

A benchmark starts this module as a child (``python -m shoal.loadgen.bench.vllm_client``), because
an import of vLLM for each load would take longer than most loads. Each line of its standard input
has a load's arguments as a JSON list. Each line of its standard output has a pair: the result, and
the reason if there is none.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any, Self

RESULT_BYTES = 64 << 20
"""The longest line that can be read: a result names every request."""


class LoadFailedError(RuntimeError):
    """vLLM's client made no result; the message is one line."""


class VllmClient:
    """The child process. An async context manager.

    Args:
        log: file that takes what vLLM's client prints.
    """

    def __init__(self, log: Path) -> None:
        self._log = log

    async def __aenter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "shoal.loadgen.bench.vllm_client"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=RESULT_BYTES,
            )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def run(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return the result of a load, as ``vllm bench serve --save-result`` writes it.

        Args:
            arguments: arguments of ``vllm bench serve``, without those for the result's file.

        Raises:
            LoadFailedError: there is no result.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(list(arguments)).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise LoadFailedError(f"vLLM's client ended, see {self._log}")
        result, problem = json.loads(line)
        if problem:
            raise LoadFailedError(f"{problem}, see {self._log}")
        found: dict[str, Any] = result
        return found


def serve() -> None:
    """Run the loads that standard input names, until it ends."""
    import vllm.benchmarks.serve as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    answers = sys.stdout
    parser = FlexibleArgumentParser()
    bench.add_cli_args(parser)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as directory, redirect_stdout(sys.stderr):
            path = Path(directory) / "result.json"
            saving = ["--save-result", "--result-filename", str(path), "--disable-tqdm"]
            try:
                bench.main(parser.parse_args([*json.loads(line), *saving]))
                answer = (json.loads(path.read_text()), "")
            except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the parent
                first = (str(error).strip().splitlines() or [""])[0]
                answer = (None, f"{type(error).__name__}: {first}")
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
