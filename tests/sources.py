"""The files that tests of the source read."""

from collections.abc import Iterable, Iterator
from pathlib import Path

PRODUCT = ("policies", "runtime", "server", "loadgen")
"""The packages that make up Shoal."""


def sources(root: Path, packages: Iterable[str] = PRODUCT) -> Iterator[Path]:
    """Yield every module of the packages below ``root``, in order."""
    for package in packages:
        yield from sorted((root / package).rglob("*.py"))
