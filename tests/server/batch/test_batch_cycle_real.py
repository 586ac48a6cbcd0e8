"""A batch on four real engines whose KV is short, with KV in the host's memory.

The node's cost model is that of GPUs on which a cycle serves most (``test_batch_policy_real.py``
says more). So the policy ``batch`` computes prompts on single engines, lets their KV wait in the
host's memory, and decodes all of them in one group.
"""

from collections.abc import Iterator

import pytest

from tests.server.batch.test_batch_policy_real import (
    ENGINES,
    LINES,
    Client,
    client,
    expected,
    served_split,
)
from tests.server.node import ServedNode

__all__ = ["client", "expected"]

BLOCKS = 16
"""KV blocks of an engine, of 32 tokens: two requests of the batch."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    folder = tmp_path_factory.mktemp("batches")
    tier = ("--kv-tier-gib", "1")
    with served_split(folder, folder / "never", *tier, slower=30, blocks=BLOCKS) as served:
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
