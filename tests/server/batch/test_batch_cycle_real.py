"""A batch on four real engines whose KV is short, with KV in the host's memory.

The node's cost model is that of GPUs on which a cycle serves most (``test_batch_policy_real.py``
says more). So the policy ``batch`` computes prompts on single engines, lets their KV wait in the
host's memory, and decodes all of them in one group.
"""

from collections.abc import Iterator

import msgspec
import pytest

from shoal.runtime.simulation.data_sheets import hardware_named
from tests.server.batch.test_batch_policy_real import (
    BLOCK_BYTES,
    ENGINES,
    LINES,
    STEP_TOKENS,
    VARIABLE,
    Client,
    client,
    expected,
    split_shoal,
)
from tests.server.node import ServedNode, served_node

__all__ = ["client", "expected"]

BLOCKS = 16
"""KV blocks of an engine, of 32 tokens: two requests of the batch."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    folder = tmp_path_factory.mktemp("batches")
    gpu = hardware_named("l40s")
    slow = msgspec.structs.replace(
        gpu,
        memory_bytes_per_second=gpu.memory_bytes_per_second / 30,
        link_bytes_per_second=gpu.link_bytes_per_second / 100,
    )
    hardware = folder / "hardware.json"
    hardware.write_bytes(msgspec.json.encode(slow))
    with served_node(
        folder,
        *("--engines", str(ENGINES), "--policy", "static-dp", "--dtype", "float32"),
        *("--max-num-seqs", "16", "--max-model-len", "512", "--enforce-eager"),
        *("--max-num-batched-tokens", str(STEP_TOKENS), "--batch-dir", str(folder / "store")),
        *("--kv-cache-memory-bytes", str(BLOCKS * BLOCK_BYTES), "--kv-tier-gib", "1"),
        *("--cost-model-shape", "llama-3-8b-bf16", "--cost-model-hardware", str(hardware)),
        real=True,
        main=split_shoal,
        **{VARIABLE: str(folder / "never")},
    ) as served:
        yield served


async def test_lines_wait_in_the_hosts_memory_for_a_group(client: Client) -> None:
    lines = LINES[::2]
    await client.learn(lines)
    before = await client.counts()
    wrong = await client.end(await client.begin(lines), lines)
    counts = await client.counts() - before
    switches = (await client.layout())["switches"]
    assert wrong == []
    assert counts["tier hit"] > len(lines) / 4
    assert counts["tier miss"] == counts["tier no_room"] == 0
    wide = [list(range(ENGINES))]
    assert wide in [switch["after"] for switch in switches]
    audit = (await client.http.post("/admin/audit")).json()
    assert (audit["clean"], audit["problems"]) == (True, [])
    policy = (await client.http.get("/admin/policy")).json()
    assert (policy["policy"], policy["errors"]) == ("batch", 0)
