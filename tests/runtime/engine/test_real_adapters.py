"""LoRA adapters on real engines: every layout generates stock's tokens, with and without them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from shoal.policies.values.partition import Partition, singles
from shoal.runtime.config import Adapter
from shoal.runtime.protocol import messages as m
from tests.random_adapter import write_adapter
from tests.random_checkpoint import CheckpointSpec, write_checkpoint
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.units import tp
from tests.variety import is_varied

SPEC = CheckpointSpec(layers=2)
PAIR = tp(0, 1)
TOKENS = 24
FEW = 8
"""Of requests that show which adapters a group has."""
PROMPTS = random_prompts((5, 33, 70, 150), seed=51)
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
"""One slot more than adapters: vLLM's operators for CPUs compute what names none with the last."""
Adapters = list[LoRARequest | None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    write_checkpoint(path, SPEC)
    return path


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """None, and two adapters."""
    directory = tmp_path_factory.mktemp("adapters")
    found: Adapters = [None]
    for number in (1, 2):
        path = directory / f"adapter-{number}"
        write_adapter(path, SPEC, seed=number)
        found.append(LoRARequest(path.name, number, str(path)))
    return found


@pytest.fixture(scope="module")
def node(model: Path, adapters: Adapters) -> Iterator[RealNode]:
    named = [Adapter(each.lora_name, each.lora_path) for each in adapters if each is not None]
    with RealNode(model, 2, adapters=named, restart_limit=9, **LORA) as node:
        yield node


def submitted(
    node: RealNode, partition: Partition, adapters: Adapters, tokens: int = TOKENS
) -> list[str]:
    """Send each prompt with every adapter, dealt out to the units; return the requests' ids."""
    return [
        node.submit(partition[number % len(partition)], [prompt], tokens, adapter=adapter)[0]
        for number, prompt in enumerate(PROMPTS)
        for adapter in adapters
    ]


def test_tokens_are_stocks_in_every_layout(node: RealNode, model: Path, adapters: Adapters) -> None:
    """Requests of one prompt find nothing of each other's in the prefix cache."""
    named = [adapter for _ in PROMPTS for adapter in adapters]
    prompts = [prompt for prompt in PROMPTS for _ in adapters]
    expected = stock_tokens(model, prompts, TOKENS, vllm_args=LORA, adapters=named)
    assert is_varied(expected)
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    for partition in (singles(2), (PAIR,)):
        node.switch(*partition)
        assert node.wait(submitted(node, partition, adapters)) == expected
    found = node.wait(submitted(node, (PAIR,), adapters))
    assert found == expected, "from the prefix cache"
    assert node.audit() == []


def carried(node: RealNode, adapters: Adapters) -> list[list[int]]:
    """Carry requests from single engines to their group and back; return what they generate."""
    node.switch()
    requests = submitted(node, singles(2), adapters, 40)
    for partition in ((PAIR,), singles(2)):
        node.wait_for_tokens(requests, len(node.tokens[requests[0]]) + 3)
        view = node.switch(*partition, treatment=m.Treatment.CARRY)
        assert (view.carried, view.recomputed) == (len(requests), {})
    return node.wait(requests)


def test_carried_requests_keep_their_adapters(node: RealNode, adapters: Adapters) -> None:
    node.switch()
    expected = node.wait(submitted(node, singles(2), adapters, 40))
    assert carried(node, adapters) == expected
    node.probe_all(probes.forget_adapters, True)
    found = carried(node, adapters)
    node.probe_all(probes.forget_adapters, False)
    same = [one == other for one, other in zip(found, expected, strict=True)]
    assert same == [adapter is None for _ in PROMPTS for adapter in adapters]


def test_views_own_no_weights_beside_slots_of_adapters(node: RealNode) -> None:
    assert node.probe_all(probes.owned_bytes) == [{"dp": 0, "tp2": 0}] * 2
    for slots in node.probe_all(probes.adapter_bytes):
        assert slots["dp"] > slots["tp2"] > slots["dp"] // 2


def test_a_group_that_is_formed_again_has_its_adapters(
    node: RealNode, adapters: Adapters, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot be formed while one is missing, and needs no file once it has been formed."""
    node.switch()
    expected = node.wait(submitted(node, singles(2), adapters, FEW))
    last = adapters[-1]
    assert last is not None
    path = Path(last.lora_path)
    away = path.with_name("away")

    def hide(_engine: int, message: m.Message) -> None:
        if isinstance(message, m.FormGroup) and path.exists():
            path.rename(away)

    node.transport.before_send = hide
    node.kill("runner-1")
    node.until(lambda: node.controller.books.engines.gone, "the death to be known")
    node.restart(*node.dead)
    rejoin = node.controller._operations.rejoin
    node.until(lambda: rejoin._failures, "an attempt to form the group")
    assert f"adapter {last.lora_name}: " in caplog.text
    assert node.wait(submitted(node, singles(2), adapters, FEW)) == expected

    node.transport.before_send = lambda _engine, _message: None
    away.rename(path)
    node.bring_back(PAIR)
    path.rename(away)
    node.switch(PAIR)
    assert node.wait(submitted(node, (PAIR,), adapters, FEW)) == expected
    away.rename(path)
