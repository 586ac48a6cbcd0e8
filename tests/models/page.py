"""Writes ``docs/models.md``: ``python -m tests.models.page`` (a minute, without a GPU).

The table of architectures is from ``scan``, so from the rules for weights and the checks that a
node makes at its start, and from the tables that the tests are run on.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from shoal.runtime.served_weights import (
    FP8_QUANTISATIONS,
    MXFP4_QUANTISATIONS,
    REPACKED_QUANTISATIONS,
)
from tests.models.architectures import OF_TRANSFORMERS, OWN
from tests.models.scan import Outcome, prepare, scan
from tests.models.tested import TokenTest, image_architectures, token_tests

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = Path(__file__).with_name("head.md")
"""The page's own sentences, with a place for each table."""

Outcomes = Mapping[str, Outcome]


def page() -> str:
    """Return the page as the installed vLLM and this code make it."""
    prepare()
    own = {name: scan(name) for name in OWN}
    of_transformers = {name: scan(name) for name in OF_TRANSFORMERS}
    everything = own | of_transformers
    served = [outcome for outcome in everything.values() if outcome.served]
    tests = token_tests()
    return HEAD.read_text(encoding="utf-8").format(
        served_count=len(served),
        count=len(everything),
        tested_count=sum(name in tests for name, outcome in everything.items() if outcome.served),
        served=_lines(_served(own, tests)),
        of_transformers=_lines(_served(of_transformers, tests)),
        refused=_lines(_others(everything, served=False)),
        not_tried=_lines(_others(everything, served=None)),
        fp8=_names(FP8_QUANTISATIONS),
        mxfp4=_names(MXFP4_QUANTISATIONS),
        images=" and ".join(f"`{name}`" for name in image_architectures()),
        repacked=_names(REPACKED_QUANTISATIONS),
    )


def _names(quantisations: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(quantisations))


def _lines(rows: Iterable[str]) -> str:
    return "\n".join(rows)


def _served(outcomes: Outcomes, tests: Mapping[str, TokenTest]) -> Iterator[str]:
    for name, outcome in outcomes.items():
        if not outcome.served:
            continue
        test = tests.get(name)
        file = "" if test is None else Path(test.file).name
        cells = (
            f"`{name}`, with `{outcome.option}`" if outcome.option else f"`{name}`",
            "DP, TP, EP" if outcome.experts else "DP, TP",
            f"no: {outcome.without_sp}" if outcome.without_sp else "yes",
            "several" if outcome.kv_groups > 1 else "one",
            "layers" if test is None else f"{test.modes} ([{file}](../{test.file}))",
        )
        yield f"| {' | '.join(cells)} |"


def _others(outcomes: Outcomes, *, served: bool | None) -> Iterator[str]:
    for name, outcome in sorted(outcomes.items(), key=lambda item: item[0].lower()):
        if outcome.served is served:
            yield f"| `{name}` | {outcome.reason} |"


def write(path: str) -> int:
    """Write the page to a file."""
    Path(path).write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(write(str(PAGE)))
