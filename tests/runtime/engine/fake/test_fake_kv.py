"""Whose blocks a process of fake engines knows."""

from typing import Any

from shoal.runtime.engine.fake.fake_kv import KvMemory


def test_a_leader_does_not_know_what_other_processes_write_to_its_members() -> None:
    memory = KvMemory()
    memory.clear(0)
    request: Any = object()
    memory.write(request, 0, {0: [1], 1: [1]})
    assert memory.knows([0])
    assert not memory.knows([0, 1])
