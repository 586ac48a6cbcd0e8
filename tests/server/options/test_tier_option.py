"""``--kv-tier-gib``: how much memory of the host it may take."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from shoal.server.errors import UserError
from shoal.server.options.tier_option import add_tier_option, carry_settings, check_tier


def parsed(*argv: str, fake: bool = False) -> Namespace:
    parser = ArgumentParser()
    add_tier_option(parser)
    args = parser.parse_args(argv)
    args.fake_engine = fake
    return args


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    """Return what a host with 64 GiB says."""
    path = tmp_path / "meminfo"
    path.write_text(
        f"MemTotal: {128 << 20} kB\nMemAvailable:   {64 << 20} kB\nHugePages_Total: 0\n"
    )
    return path


def test_without_it_nobody_looks() -> None:
    args = parsed()
    assert args.kv_tier_gib == 0
    check_tier(args, 8, Path("/nowhere"))


def test_what_the_host_has_may_be_taken(meminfo: Path) -> None:
    check_tier(parsed("--kv-tier-gib", "8"), 8, meminfo)


def test_more_than_the_host_has_is_refused(meminfo: Path) -> None:
    with pytest.raises(UserError, match="--kv-tier-gib 9: 8 engines take 72 GiB, and the host has"):
        check_tier(parsed("--kv-tier-gib", "9"), 8, meminfo)
    check_tier(parsed("--kv-tier-gib", "9", fake=True), 8, meminfo)


def test_a_negative_number_is_refused(meminfo: Path) -> None:
    with pytest.raises(UserError, match="--kv-tier-gib -1"):
        check_tier(parsed("--kv-tier-gib", "-1"), 8, meminfo)


def test_a_node_gets_it_in_bytes() -> None:
    args = parsed("--kv-tier-gib", "3")
    args.carry_path, args.precopy_tokens = "auto", 5
    assert carry_settings(args) == {
        "carry_path": "auto",
        "precopy_tokens": 5,
        "tier_bytes": 3 * 2**30,
    }
