"""Which memory and which copier a device has, and which GPUs have to reach each other."""

import pytest
import torch

from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.weights.sharing import devices
from shoal.runtime.engine.weights.sharing.device_shards import DeviceShards
from shoal.runtime.engine.weights.sharing.devices import check_reach, memory_and_copier
from shoal.runtime.engine.weights.sharing.shard_memory import HostShards
from shoal.runtime.engine.weights.sharing.slots import HostCopier
from shoal.runtime.engine.weights.sharing.stream_copier import StreamCopier


def test_a_gpu_has_its_drivers_memory_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CudaDriver", object)
    memory, copier = memory_and_copier("test", torch.device("cuda", 1))
    assert (type(memory), type(copier)) == (DeviceShards, StreamCopier)
    memory, copier = memory_and_copier("test", torch.device("cpu", 1))
    assert (type(memory), type(copier)) == (HostShards, HostCopier)


@pytest.mark.parametrize(
    ("engine", "share", "peers"), [(0, 1, []), (1, 2, [0]), (2, 2, [3]), (6, 4, [4, 5, 7])]
)
def test_only_gpus_that_share_have_to_reach_each_other(
    monkeypatch: pytest.MonkeyPatch, engine: int, share: int, peers: list[int]
) -> None:
    asked: list[int] = []

    def reaches(gpu: int, peer: int) -> bool:
        assert gpu == engine
        asked.append(peer)
        return len(asked) < len(peers)

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    if not peers:
        check_reach(engine, share)
        return
    with pytest.raises(NotSharedError) as caught:
        check_reach(engine, share)
    assert sorted(asked) == peers
    assert str(caught.value) == (
        f"--share-weights {share}: GPU {engine} cannot reach the memory of GPU {asked[-1]}"
    )
