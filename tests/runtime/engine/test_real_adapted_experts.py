"""LoRA adapters of models with routed experts: all but routed experts has adapters."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.policies.values.partition import singles
from shoal.runtime.config import Adapter
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from tests.depth import skip_unless_deep
from tests.random_adapter import Shapes, attention_shapes, merge_adapter, mlp_shapes, write_adapter
from tests.random_checkpoint import Architecture, CheckpointSpec, write_checkpoint
from tests.runtime.engine import probes
from tests.runtime.engine.adapters import Adapters, named, submitted, write_adapters
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.real_node import RealNode, stock_tokens
from tests.runtime.engine.scripted_shift import Script
from tests.units import tp
from tests.variety import is_varied

PAIR = tp(0, 1)
TOKENS = 24
PROMPTS = random_prompts((5, 33, 70, 150), seed=51)
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
SPECS = {
    "qwen3-moe": CheckpointSpec(Architecture.QWEN3_MOE, layers=2),
    "mixtral": CheckpointSpec(Architecture.MIXTRAL, layers=2),
    "glm4-moe": CheckpointSpec(Architecture.GLM4_MOE, layers=2),
}


def shapes_of(spec: CheckpointSpec) -> Shapes:
    """Return attention's projections, and those of a dense layer and of shared experts."""
    found = attention_shapes(spec)
    if spec.architecture is Architecture.GLM4_MOE:
        hidden = spec.hidden_size
        found |= mlp_shapes("model.layers.0.mlp", hidden, spec.intermediate_size)
        found |= mlp_shapes("model.layers.1.mlp.shared_experts", hidden, spec.expert_size)
    return found


@pytest.fixture(scope="module", params=SPECS)
def spec(request: pytest.FixtureRequest) -> CheckpointSpec:
    if request.param != "qwen3-moe":
        skip_unless_deep()
    return SPECS[request.param]


@pytest.fixture(scope="module")
def model(spec: CheckpointSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "experts"
    write_checkpoint(path, spec)
    return path


@pytest.fixture(scope="module")
def adapters(spec: CheckpointSpec, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """None, and two adapters."""
    return write_adapters(tmp_path_factory.mktemp("adapters"), spec, shapes=shapes_of(spec))


@pytest.fixture(scope="module")
def node(model: Path, adapters: Adapters) -> Iterator[RealNode]:
    with RealNode(model, 2, adapters=named(adapters), max_sp=2, **LORA) as node:
        yield node


@pytest.fixture(scope="module")
def expected(
    model: Path, adapters: Adapters, tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """Stock's tokens for each prompt with every adapter.

    On CPUs stock vLLM serves no adapters beside experts. So it has models in whose weights they
    are.
    """
    models = [model]
    for adapter in adapters[1:]:
        assert adapter is not None
        models.append(tmp_path_factory.mktemp("merged") / adapter.lora_name)
        merge_adapter(models[-1], model, Path(adapter.lora_path))
    each = [stock_tokens(path, PROMPTS, TOKENS) for path in models]
    found = [tokens for of_prompt in zip(*each, strict=True) for tokens in of_prompt]
    assert is_varied(found)
    assert len({tuple(tokens) for tokens in found}) == len(found), "adapters change every request"
    return found


def test_tokens_are_stocks_in_every_layout_and_mode(
    node: RealNode, adapters: Adapters, expected: list[list[int]]
) -> None:
    for partition in (singles(2), (PAIR,)):
        node.switch(*partition)
        assert node.wait(submitted(node, adapters, PROMPTS, TOKENS)) == expected
    node.switch()
    node.probe_all(probes.take_modes)
    node.script(Script.RANDOM)
    with node.bound(PAIR):
        assert node.wait(submitted(node, adapters, PROMPTS, TOKENS)) == expected
    node.script(Script.TP)
    assert all(min(ran[mode] for mode in Mode) > 0 for ran in node.probe_all(probes.take_modes))
    assert node.audit() == []


def carried(node: RealNode, adapters: Adapters) -> list[list[int]]:
    """Carry requests from single engines to their group and back; return what they generate."""
    node.switch()
    requests = submitted(node, adapters, PROMPTS, 40)
    for partition in ((PAIR,), singles(2)):
        node.wait_for_tokens(requests, len(node.tokens[requests[-1]]) + 3)
        view = node.switch(*partition, treatment=m.Treatment.CARRY)
        assert (view.carried, view.recomputed) == (len(requests), {})
    return node.wait(requests)


def test_carried_requests_keep_their_adapters(node: RealNode, adapters: Adapters) -> None:
    node.switch()
    expected = node.wait(submitted(node, adapters, PROMPTS, 40))
    assert carried(node, adapters) == expected
    node.probe_all(probes.forget_adapters, True)
    found = carried(node, adapters)
    node.probe_all(probes.forget_adapters, False)
    same = [one == other for one, other in zip(found, expected, strict=True)]
    assert same == [adapter is None for _ in PROMPTS for adapter in adapters]


def test_layouts_own_no_weights_beside_slots_of_adapters(node: RealNode) -> None:
    assert node.probe_all(probes.owned_bytes) == [{"dp": 0, "tp2": 0}] * 2


def test_an_adapter_of_routed_experts_is_refused_by_name(
    model: Path, spec: CheckpointSpec, tmp_path: Path
) -> None:
    path = tmp_path / "expert"
    mixtral = spec.architecture is Architecture.MIXTRAL
    layer = "model.layers.1." + (
        "block_sparse_moe.experts.0.w2" if mixtral else "mlp.experts.0.down_proj"
    )
    shapes = attention_shapes(spec) | {layer: (spec.hidden_size, spec.expert_size)}
    write_adapter(path, spec, seed=3, shapes=shapes)
    refused = f"adapter expert: it adapts {layer}, and"
    with (
        pytest.raises(Exception, match=refused),
        RealNode(model, 1, adapters=[Adapter("expert", str(path))], **LORA),
    ):
        pass
