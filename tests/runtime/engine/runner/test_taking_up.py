"""Members read KV ahead of a carry, whichever unit they are in meanwhile."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.policies.values.layouts import DP, Unit
from shoal.runtime.config import CarryPath
from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kv import kv_reader
from shoal.runtime.engine.kv.host_copy import plain_order
from shoal.runtime.engine.kv.kv_memory import HostMemory
from shoal.runtime.engine.kv.kv_pages import Page
from shoal.runtime.engine.link.instructions import Carry, Copied, CopyAhead, Foresee
from shoal.runtime.engine.runner import taking_up
from shoal.runtime.engine.runner.taking_up import TakingUp
from tests.runtime.engine.kv.carried_kv import CASES, Case, Engines


def order(case: Case, _model_runner: Any, _group: int, page: Page) -> torch.Tensor:
    return plain_order(page, case.token_bytes, 2)


class Members:
    """The runners' parts of a case's engines in one process, with their KV in shared memory."""

    def __init__(
        self,
        case: Case,
        directory: Path,
        patch: pytest.MonkeyPatch,
        path: CarryPath = CarryPath.AUTO,
    ) -> None:
        self.engines = Engines(case)
        patch.setattr(taking_up, "pages_of", lambda _: [case.pages])
        patch.setattr(taking_up, "element_order", partial(order, case))
        self.node: Any = SimpleNamespace(
            runtime_dir=str(directory),
            max_sp=case.max_sp,
            engines=4,
            carry_path=path,
            tier_bytes=0,
        )
        self.buffers = dict[int, torch.Tensor]()
        self.parts = {engine: self._start(engine) for engine in self.engines.buffers}

    def _start(self, engine: int) -> TakingUp:
        memory = HostMemory("test")
        raw = memory.allocate(self.engines.case.size)
        raw[:] = self.engines.buffers[engine]
        self.buffers[engine] = raw
        loader: Any = SimpleNamespace(
            buffer=SimpleNamespace(raw=raw, memory=memory),
            workers={DP: SimpleNamespace(model_runner=None)},
        )
        return TakingUp(self.node, engine, loader)

    def read(self, engine: int, target: Unit | None = None) -> Copied:
        case = self.engines.case
        ahead = CopyAhead(1, case.source, target or case.target, self.engines.requests)
        return self.parts[engine].copy_ahead(ahead)()


@pytest.mark.parametrize("name", ["DP to TP2", "DP of another engine to TP2", "TP2 to DP"])
def test_members_of_the_target_read_ahead_and_others_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = Members(CASES[name], tmp_path, monkeypatch)
    target = members.engines.case.target
    for engine, buffer in members.buffers.items():
        before, expected = buffer.clone(), members.engines.expected(engine)
        copied = members.read(engine)
        assert bool(copied.bytes) == (engine in target.engines)
        assert not copied.problem
        assert buffer.equal(expected)
        assert before.equal(expected) == (engine not in target.engines)


@pytest.mark.parametrize("name", ["DP to TP2", "DP of another engine to TP2", "TP2 to DP"])
def test_what_was_foreseen_is_read_later(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = Members(CASES[name], tmp_path, monkeypatch)
    case, requests = members.engines.case, members.engines.requests
    worker: Any = SimpleNamespace(unit=case.target, model_runner=None)
    for engine in case.target.engines:
        part, buffer = members.parts[engine], members.buffers[engine]
        before, expected = buffer.clone(), members.engines.expected(engine)
        part.foresee(case.target, Foresee(6, case.source, []))
        part.foresee(case.target, Foresee(7, case.source, requests))
        assert buffer.equal(before)
        assert not before.equal(expected)
        with monkeypatch.context() as patch:
            patch.setattr(kv_reader, "pieces", None)
            copied = part.carry(worker, Carry(1, case.source, [], 7))()
        assert copied.bytes
        assert buffer.equal(expected)


def test_another_copy_than_was_foreseen_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = Members(CASES["DP to TP2"], tmp_path, monkeypatch)
    case = members.engines.case
    worker: Any = SimpleNamespace(unit=case.target, model_runner=None)
    members.parts[0].foresee(case.target, Foresee(7, case.source, members.engines.requests))
    with pytest.raises(RuntimeError, match="copy 6 was not foreseen, but 7"):
        members.parts[0].carry(worker, Carry(1, case.source, [], 6))


def test_kv_that_cannot_be_read_is_a_problem_of_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = Members(CASES["DP of another engine to TP2"], tmp_path, monkeypatch)
    (tmp_path / "kv-3").unlink()
    copied = members.read(0)
    assert (copied.bytes, copied.problem) == (0, "engine 3 has not announced its KV cache")


def test_members_whose_memory_is_not_shared_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: Any) -> None:
        raise NotSharedError("KV of type x cannot be divided otherwise")

    case = replace(CASES["DP to TP2"], spans=((0, 8),))
    members = Members(case, tmp_path, monkeypatch)
    monkeypatch.setattr(taking_up, "pages_of", refused)
    members.parts[0] = members._start(0)
    assert members.read(0).problem == "KV of type x cannot be divided otherwise"
    assert not members.read(1).problem
