"""LoRA adapters on real engines: every layout generates stock's tokens, with and without them.

Steps hold requests of two adapters and of none, and chunks of prompts that are longer than a step.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.policies.values.layouts import Layout, Unit
from shoal.policies.values.partition import Partition, singles
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.random_checkpoint import CheckpointSpec, write_checkpoint
from tests.runtime.engine import probes
from tests.runtime.engine.adapters import Adapters, named, write_adapters
from tests.runtime.engine.every_layout import COMPARED, first
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.runtime.engine.scripted_shift import Script
from tests.units import pp, tp
from tests.variety import is_varied

SPEC = CheckpointSpec(layers=2)
PAIR, QUARTET = tp(0, 1), tp(0, 1, 2, 3)
TOKENS = 24
FEW = 8
"""Of requests that show which adapters a group has."""
PROMPTS = random_prompts((5, 33, 70, 150), seed=51)
(LATE,) = random_prompts((150,), seed=52)
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
"""One slot more than adapters: vLLM's operators for CPUs compute what names none with the last."""
Prompts = list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    write_checkpoint(path, SPEC)
    return path


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """None, and two adapters, the second one of the embeddings and the head, too."""
    return write_adapters(tmp_path_factory.mktemp("adapters"), SPEC, ends=True)


@pytest.fixture(scope="module")
def node(model: Path, adapters: Adapters) -> Iterator[RealNode]:
    with RealNode(model, 2, adapters=named(adapters), restart_limit=9, max_sp=2, **LORA) as node:
        yield node


@pytest.fixture(scope="module")
def longer(model: Path, adapters: Adapters) -> list[list[int]]:
    """Stock's tokens for what ``submitted`` sends, and more of them."""
    prompts = [prompt for prompt in PROMPTS for _ in adapters]
    each = [adapter for _ in PROMPTS for adapter in adapters]
    return stock_tokens(model, prompts, TOKENS, vllm_args=LORA, adapters=each)


@pytest.fixture(scope="module")
def expected(longer: list[list[int]]) -> list[list[int]]:
    """Stock's tokens for what ``submitted`` sends."""
    return first(longer)


def submitted(
    node: RealNode,
    partition: Partition,
    adapters: Adapters,
    tokens: int = COMPARED,
    prompts: Prompts = PROMPTS,
) -> list[str]:
    """Send each prompt with every adapter, dealt out to the units; return the requests' ids."""
    return [
        node.submit(partition[number % len(partition)], [prompt], tokens, adapter=adapter)[0]
        for number, prompt in enumerate(prompts)
        for adapter in adapters
    ]


def test_adapters_change_every_request(longer: list[list[int]], expected: list[list[int]]) -> None:
    assert is_varied(longer)
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


def test_tokens_are_stocks_in_every_layout(
    node: RealNode, adapters: Adapters, expected: list[list[int]]
) -> None:
    """Requests of one prompt find nothing of each other's in the prefix cache."""
    for partition in (singles(2), (PAIR,)):
        node.switch(*partition)
        assert node.wait(submitted(node, partition, adapters)) == expected
    found = node.wait(submitted(node, (PAIR,), adapters))
    assert found == expected, "from the prefix cache"
    assert node.audit() == []


# --- by sequence ---


def by_sequence(
    node: RealNode,
    group: Unit,
    adapters: Adapters,
    script: Script = Script.SP,
    prompts: Prompts = PROMPTS,
) -> list[list[int]]:
    """Return what a group generates that was just bound; some steps at least run by sequence."""
    node.switch()
    node.probe_all(probes.take_modes)
    node.script(script)
    with node.bound(group):
        found = node.wait(submitted(node, (group,), adapters, prompts=prompts))
    node.script(Script.TP)
    ran = [node.probe(engine, probes.take_modes) for engine in group.engines]
    assert all(modes == ran[0] and modes[Mode.SP] > 0 for modes in ran)
    assert bool(ran[0].get(Mode.TP)) == (script is not Script.SP)
    return found


@pytest.mark.parametrize("script", [Script.SP, Script.RANDOM])
def test_tokens_are_stocks_by_sequence(
    node: RealNode, adapters: Adapters, expected: list[list[int]], script: Script
) -> None:
    assert by_sequence(node, PAIR, adapters, script) == expected
    assert node.audit() == []


def test_padding_of_shares_has_no_adapter(
    node: RealNode, adapters: Adapters, expected: list[list[int]]
) -> None:
    """Shares are padded as for CUDA graphs, which CPUs lack."""
    node.probe_all(probes.pretend_captures, 5, 12, 40)
    found = by_sequence(node, PAIR, adapters)
    assert node.probe_all(probes.forget_captures) == [1, 1]
    assert found == expected


def test_other_adapters_than_those_of_its_share_change_tokens(
    node: RealNode, adapters: Adapters
) -> None:
    """Without any in its share, requests with adapters change alone; with other tokens', others."""
    prompts = random_prompts((40, 90), seed=60)
    node.switch()
    expected = node.wait(submitted(node, singles(2), adapters, prompts=prompts))
    same = {}
    for start in (1_000, 1, None):
        node.probe_all(probes.move_adapters, PAIR.layout, start)
        found = by_sequence(node, PAIR, adapters, prompts=prompts)
        same[start] = [one == other for one, other in zip(found, expected, strict=True)]
    assert same[1_000] == [adapter is None for _ in prompts for adapter in adapters]
    assert not all(same[1][:: len(adapters)]), "requests without adapters get some, too"
    assert all(same[None])


def test_tokens_are_stocks_where_the_base_is_a_group(
    model: Path, adapters: Adapters, expected: list[list[int]]
) -> None:
    """Heads are in another order than members there, and adapters' rows with them."""
    with RealNode(model, 4, adapters=named(adapters), max_sp=2, **LORA) as node:
        assert Layout(tp=4) in node.config.layouts
        for script in (Script.SP, Script.RANDOM):
            assert by_sequence(node, QUARTET, adapters, script) == expected
        with node.bound(QUARTET):
            assert node.wait(submitted(node, (QUARTET,), adapters)) == expected
        assert node.audit() == []


def test_stages_have_the_adapters_of_their_layers(
    model: Path, adapters: Adapters, expected: list[list[int]]
) -> None:
    pipeline = pp(0, 1)
    with RealNode(model, 2, adapters=named(adapters), max_pp=2, max_sp=2, **LORA) as node:
        with node.bound(pipeline):
            assert node.wait(submitted(node, (pipeline,), adapters)) == expected
        requests = submitted(node, singles(2), adapters, 120)
        for partition in ((pipeline,), (PAIR,), (pipeline,), singles(2)):
            node.wait_for_tokens(requests, len(node.tokens[requests[-1]]) + 3)
            view = node.switch(*partition, treatment=m.Treatment.CARRY)
            assert (view.carried, view.recomputed) == (len(requests), {})
        assert first(node.wait(requests)) == expected
        assert node.probe_all(probes.owned_bytes) == [{"dp": 0, "pp2": 0, "tp2": 0}] * 2
        assert node.audit() == []


# --- switches, and what layouts have ---


def carried(node: RealNode, adapters: Adapters) -> list[list[int]]:
    """Carry requests from single engines to their group and back; return what they generate.

    The last ones' prompts are computed in the group.
    """
    node.switch()
    requests = submitted(node, singles(2), adapters, 40)
    for partition in ((PAIR,), singles(2)):
        node.wait_for_tokens(requests, len(node.tokens[requests[-1]]) + 3)
        view = node.switch(*partition, treatment=m.Treatment.CARRY)
        assert (view.carried, view.recomputed) == (len(requests), {})
        if partition == (PAIR,):
            requests += submitted(node, partition, adapters, 40, [LATE])
    return node.wait(requests)


def test_carried_requests_keep_their_adapters(node: RealNode, adapters: Adapters) -> None:
    node.switch()
    expected = node.wait(submitted(node, singles(2), adapters, 40, [*PROMPTS, LATE]))
    for script in (Script.TP, Script.SP):
        node.script(script)
        node.probe_all(probes.take_modes)
        assert carried(node, adapters) == expected
        node.script(Script.TP)
        ran = node.probe_all(probes.take_modes)
        assert [Mode.SP in modes for modes in ran] == [script is Script.SP] * 2
    node.probe_all(probes.forget_adapters, True)
    found = carried(node, adapters)
    node.probe_all(probes.forget_adapters, False)
    same = [one == other for one, other in zip(found, expected, strict=True)]
    assert same == [adapter is None for _ in (*PROMPTS, LATE) for adapter in adapters]


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
    found = by_sequence(node, PAIR, adapters)
    assert [tokens[:FEW] for tokens in found] == expected
    away.rename(path)
