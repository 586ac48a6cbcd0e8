"""vLLM's compile cache does not see weight order, so Shoal's configurations must tell it.

An artifact compiled for one order of rows and loaded for another gives wrong output with no error.
"""

import pytest
from vllm.config import VllmConfig

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.config import NodeConfig
from shoal.runtime.engine.layouts import engine_config as module
from shoal.runtime.engine.layouts.engine_config import engine_config
from shoal.runtime.engine.link.executor import UnitExecutor
from tests.runtime.engine.real_node import configs_of


@pytest.fixture
def config(llama: object, tmp_path: object) -> "ConfigOf":
    return ConfigOf(str(llama))


class ConfigOf:
    """Builds the configurations of nodes with different largest groups."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __call__(self, max_group: int, layout: Layout = DP) -> VllmConfig:
        node = NodeConfig(4, max_group, "manual", "unused", configs_of(self._model, max_group))
        return engine_config(node, layout, UnitExecutor)


@pytest.mark.parametrize("layout", [DP, Layout(tp=2)])
def test_another_number_of_groups_has_another_key(config: ConfigOf, layout: Layout) -> None:
    assert config(2, layout).compute_hash() != config(4, layout).compute_hash()


@pytest.mark.parametrize("layout", [DP, Layout(tp=2)])
def test_the_same_scheme_has_the_same_key(config: ConfigOf, layout: Layout) -> None:
    assert config(4, layout).compute_hash() == config(4, layout).compute_hash()


def test_another_scheme_has_another_key(config: ConfigOf, monkeypatch: pytest.MonkeyPatch) -> None:
    before = config(4).compute_hash()
    monkeypatch.setattr(module, "WEIGHT_SCHEME", "gate_up=split")
    assert config(4).compute_hash() != before


def test_stock_vllm_has_another_key(config: ConfigOf) -> None:
    stock = config(4)
    before = stock.compute_hash()
    stock.additional_config = {}
    assert stock.compute_hash() != before
