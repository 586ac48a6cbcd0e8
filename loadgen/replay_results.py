"""The file of a replay: its figures, every request, and the keys of ``vllm bench serve``."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.loadgen import text_tables
from shoal.loadgen.curves import Timeline
from shoal.loadgen.exchange import Exchange, Outcome, tokens_by_second
from shoal.loadgen.open_loop import Run
from shoal.loadgen.summary import EVERYTHING, Objective, Report, report
from shoal.loadgen.validity import Verdict


class ResultError(ValueError):
    """A file does not hold a replay; the message is one line that names it."""


@dataclass(frozen=True)
class Result:
    """One replay, as a file keeps it."""

    name: str
    workload: str
    endpoint: str
    """The route that the requests went to."""
    model: str
    verdict: Verdict
    run: Run

    def report(self, objectives: Sequence[Objective] = ()) -> Report:
        """Return the run's figures."""
        return report(
            self.name,
            [exchange.record() for exchange in self.run.exchanges],
            tokens_by_second(self.run.exchanges),
            switching=self.run.log.switching(),
            objectives=objectives,
            duration=self.run.duration,
        )

    def summary(self, objectives: Sequence[Objective] = ()) -> str:
        """Return the run as ``vllm bench serve`` prints one."""
        peaks = vllm_peaks(self.run.exchanges)
        labels = ("Peak output token throughput (tok/s)", "Peak concurrent requests")
        return text_tables.summary(
            self.report(objectives),
            self.run.outcomes(),
            dict(zip(labels, peaks.values(), strict=True)),
        )

    def notes(self) -> list[str]:
        """Return notes on the run's token counts, one line each."""
        counts = Counter(flaw for exchange in self.run.exchanges for flaw in exchange.flaws())
        notes = [f"{count} requests {flaw.value}" for flaw, count in counts.items()]
        if self.run.unsent and not self.run.interrupted:
            notes.append(f"{self.run.unsent} turns of chats were not sent, as one before failed")
        return notes

    def timeline(self) -> Timeline:
        """Return the run's data for the picture."""
        return Timeline(
            self.name,
            [exchange.record() for exchange in self.run.exchanges],
            tokens=tokens_by_second(self.run.exchanges),
            layouts=self.run.log.layouts,
        )


class _File(msgspec.Struct):
    """The part of a file that ``read`` needs."""

    replay: Result


def encode(result: Result, objectives: Sequence[Objective], **about: Any) -> bytes:
    """Return a replay as JSON.

    The top level has the keys of ``vllm bench serve``'s result file. Beside them are ``replay``
    with everything recorded, ``report`` with the figures, ``outcomes``, and the entries of
    ``about``.
    """
    figures = result.report(objectives)
    content = {
        **vllm_keys(result, figures),
        **about,
        "outcomes": result.run.outcomes(),
        "report": asdict(figures),
        "replay": result,
    }
    return msgspec.json.encode(content) + b"\n"


def read(path: Path) -> Result:
    """Return the replay in a file.

    Raises:
        ResultError: the file cannot be read, or does not hold a replay.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).replay
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ResultError(f"{path} is not a file of 'shoal replay --json': {error}") from error


def vllm_keys(result: Result, figures: Report) -> dict[str, Any]:
    """Return the keys of ``vllm bench serve --save-result --save-detailed`` that are known.

    As there, failed requests are in all lists, with 0 for missing values.
    """
    run = result.run
    everything = figures.groups[EVERYTHING]
    sent = [exchange for exchange in run.exchanges if exchange.sent is not None]
    return {
        "label": result.name,
        "backend": "openai-chat" if "chat" in result.endpoint else "openai",
        "model_id": result.model,
        "num_prompts": run.planned,
        "duration": figures.duration,
        "completed": everything.finished,
        "failed": everything.requests - everything.finished,
        "total_input_tokens": figures.prompt_tokens,
        "total_output_tokens": figures.output_tokens,
        "request_throughput": figures.request_throughput,
        "request_goodput": everything.goodput,
        "output_throughput": figures.output_throughput,
        "total_token_throughput": figures.total_throughput,
        **vllm_peaks(sent),
        **milliseconds(figures),
        "input_lens": [exchange.counted_prompt for exchange in sent],
        "output_lens": [_if_ok(exchange, exchange.counted_output) for exchange in sent],
        "ttfts": [_after_start(exchange, exchange.chunk_times[:1]) for exchange in sent],
        "itls": [exchange.itls for exchange in sent],
        "latencies": [_after_start(exchange, exchange.chunk_times[-1:]) for exchange in sent],
        "start_times": [exchange.sent for exchange in sent],
        "errors": [exchange.error or _if_not_ok(exchange) for exchange in sent],
    }


def _if_ok(exchange: Exchange, count: int) -> int:
    return count if exchange.outcome is Outcome.OK else 0


def _if_not_ok(exchange: Exchange) -> str:
    return "" if exchange.outcome is Outcome.OK else exchange.outcome.value


def _after_start(exchange: Exchange, times: Sequence[float]) -> float:
    return times[0] - (exchange.sent or 0.0) if times else 0.0


def milliseconds(figures: Report) -> dict[str, float]:
    """Return ``mean_ttft_ms`` and the like, as ``vllm bench serve`` names them."""
    everything = figures.groups[EVERYTHING]
    found = {}
    for metric in ("ttft", "tpot", "itl", "e2el"):
        values = getattr(everything, metric)
        if values is not None:
            for share, value in asdict(values).items():
                name = "median" if share == "p50" else share
                found[f"{name}_{metric}_ms"] = 1000 * value
    return found


def vllm_peaks(exchanges: Sequence[Exchange]) -> dict[str, float]:
    """Return the most chunks and the most requests in one second, counting only successes."""
    answered = [exchange for exchange in exchanges if exchange.outcome is Outcome.OK]
    start = min((exchange.sent or 0.0 for exchange in answered), default=0.0)
    chunks: Counter[int] = Counter()
    running: Counter[int] = Counter()
    for exchange in answered:
        seconds = [int(at - start) for at in exchange.chunk_times]
        chunks.update(seconds)
        running.update(range(int((exchange.sent or 0.0) - start), seconds[-1] + 1))
    return {
        "max_output_tokens_per_s": float(max(chunks.values(), default=0)),
        "max_concurrent_requests": max(running.values(), default=0),
    }
