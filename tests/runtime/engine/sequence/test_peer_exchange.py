"""Whether members exchange through each other's memory (how: ``test_head_exchange.py``)."""

import io
import logging
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import _symmetric_memory

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.sequence.peer_exchange import exchange_memory, exchanges_by_peers
from shoal.runtime.engine.sequence.sp_settings import SettingError
from tests.runtime.engine.groups.test_rendezvous import PAIR, Engine, ask, make

GROUP = (4, 5, 6, 7)


def everybody(_device: int, _peer: int) -> bool:
    return True


def connected(_devices: Sequence[int]) -> bool:
    return True


def apart(_devices: Sequence[int]) -> bool:
    return False


def nobody(*_: object) -> bool:
    raise AssertionError("nobody asks")


def all_but(*barred: tuple[int, int]) -> Callable[[int, int], bool]:
    return lambda device, peer: (device, peer) not in barred


@pytest.mark.parametrize("setting", ["auto", "peer"])
def test_members_that_reach_each_other_do(setting: str, caplog: pytest.LogCaptureFixture) -> None:
    asked = list[tuple[int, int]]()

    def can_access(device: int, peer: int) -> bool:
        asked.append((device, peer))
        return True

    caplog.set_level(logging.INFO)
    assert exchanges_by_peers(setting, GROUP, can_access=can_access, by_nvlink=connected)
    assert sorted(asked) == sorted(permutations(GROUP, 2)), "each pair, both ways, and no other"
    assert not caplog.records


@pytest.mark.parametrize("pair", list(permutations(GROUP, 2)))
def test_one_pair_that_does_not_is_enough_and_is_named(
    pair: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    can_access = all_but(pair)
    caplog.set_level(logging.INFO)
    assert not exchanges_by_peers("auto", GROUP, can_access=can_access, by_nvlink=connected)
    problem = f"GPU {pair[0]} cannot access the memory of GPU {pair[1]}"
    (record,) = caplog.records
    assert record.getMessage() == (
        f"steps by sequence of GPUs 4, 5, 6, 7 exchange by NCCL: {problem}"
    )
    with pytest.raises(SettingError) as error:
        exchanges_by_peers("peer", GROUP, can_access=can_access, by_nvlink=connected)
    assert str(error.value) == f"SHOAL_SP_EXCHANGE=peer: {problem}"


def test_a_pair_of_another_group_is_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    can_access = all_but((3, 4), (4, 3))
    assert exchanges_by_peers("auto", GROUP, can_access=can_access, by_nvlink=connected)
    assert not caplog.records


def test_without_nvlink_members_do_if_they_are_told_to(caplog: pytest.LogCaptureFixture) -> None:
    """Peers on PCIe reach each other's memory, but need not have atomic operations on it."""
    caplog.set_level(logging.INFO)
    assert not exchanges_by_peers("auto", GROUP, can_access=everybody, by_nvlink=apart)
    (record,) = caplog.records
    assert record.getMessage().endswith("by NCCL: NVLink does not connect every two of them")
    assert exchanges_by_peers("peer", GROUP, can_access=everybody, by_nvlink=apart)


def test_who_wants_collectives_has_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert not exchanges_by_peers("nccl", GROUP, can_access=nobody, by_nvlink=nobody)
    assert not caplog.records


def test_engines_on_cpus_have_nothing_to_reach(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert not exchanges_by_peers("auto", (), can_access=nobody, by_nvlink=nobody)
    assert not caplog.records
    with pytest.raises(SettingError, match="there are no GPUs"):
        exchanges_by_peers("peer", (), can_access=nobody, by_nvlink=nobody)


REFUSED = "memory cannot be shared (pidfd_getfd: Operation not permitted)"


class Reached:
    """What torch's handle of a group's memory is asked for at once."""

    def get_buffer(self, _member: int, shape: tuple[int], dtype: torch.dtype, _: int) -> Any:
        return torch.empty(shape, dtype=dtype)


class Alone:
    """A group of one member."""

    group_name = ""

    def allreduce(self, _answers: list[torch.Tensor], _options: object) -> Any:
        return SimpleNamespace(wait=lambda: None)


def torch_that(shares: bool, patch: pytest.MonkeyPatch) -> None:
    def empty(words: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(words, dtype=dtype, device=device)

    def rendezvous(*_: object) -> Reached:
        if not shares:
            raise RuntimeError("pidfd_getfd: Operation not permitted\nException raised from ...")
        return Reached()

    patch.setattr(_symmetric_memory, "empty", empty)
    patch.setattr(_symmetric_memory, "rendezvous", rendezvous)


def share(
    directory: Path,
    engine: int,
    groups: dict[Unit, Any],
    unit: Unit,
    barred: int | None,
    tried: int | None = None,
) -> str:
    """Return by what an engine exchanges and what it logs.

    Args:
        barred: is refused by its host.
        tried: could not, in a narrower group.
    """
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("shoal.engine").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        torch_that(engine != barred, patch)
        memory = exchange_memory(
            groups[unit], 16, torch.device("cpu"), tried=engine == tried, required=False
        )
    logging.getLogger("shoal.engine").removeHandler(handler)
    return f"{'NCCL' if memory is None else 'peers'}: {log.getvalue()}"


def test_all_members_go_without_memory_that_one_cannot_share(tmp_path: Path) -> None:
    pair = [Engine(tmp_path, engine) for engine in PAIR.engines]
    try:
        ask(pair, make, PAIR, 0)
        assert ask(pair, share, PAIR, None) == ["peers: "] * 2
        told = "NCCL: steps by sequence exchange by NCCL, which takes longer: "
        assert ask(pair, share, PAIR, PAIR.engines[1]) == [
            f"{told}a peer cannot share its memory\n",
            f"{told}{REFUSED}\n",
        ]
        unasked = f"{told}a peer cannot share its memory\n"
        assert ask(pair, share, PAIR, None, PAIR.engines[0]) == [unasked] * 2, "nobody tries again"
    finally:
        for engine in pair:
            engine.kill()


def test_memory_that_is_wanted_and_cannot_be_shared_is_one_line_that_says_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch_that(False, monkeypatch)
    with pytest.raises(NotSharedError) as raised:
        exchange_memory(Alone(), 16, torch.device("cpu"), tried=False, required=True)
    assert str(raised.value) == f"{REFUSED}; SHOAL_SP_EXCHANGE=nccl goes without"
