"""Whose blocks a process of fake engines knows."""

from shoal.policies.values.layouts import alone
from shoal.runtime.engine.fake.fake_kv import KvMemory
from shoal.runtime.engine.fake.fake_request import FakeRequest
from shoal.runtime.protocol import wire
from tests.runtime.loopback_node import request_payload


def test_a_leader_does_not_know_what_other_processes_write_to_its_members() -> None:
    memory = KvMemory()
    memory.clear(0)
    request = FakeRequest(wire.decode_request(request_payload("r", [1], 1)), [1], 1)
    memory.write(alone(0), request, 0, {0: [1], 1: [1]}, 16)
    assert memory.knows([0])
    assert not memory.knows([0, 1])
