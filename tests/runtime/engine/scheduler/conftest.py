"""Toy engines of each kind of model runner."""

from pathlib import Path
from typing import Any

import pytest

from shoal.runtime.config import LayoutConfigs
from tests.runtime.engine.real_node import configs_of
from tests.runtime.engine.scheduler.toy_engines import Make, ToyEngines


@pytest.fixture(scope="package")
def configs(llama: Path) -> LayoutConfigs:
    return configs_of(str(llama), 2, max_num_batched_tokens=16, async_scheduling=True)


@pytest.fixture(params=["v1", "v1-sync", "v2"])
def make(request: pytest.FixtureRequest, configs: LayoutConfigs) -> Make:
    kind: dict[str, Any] = {"asynchronous": request.param != "v1-sync", "v2": request.param == "v2"}
    return lambda **options: ToyEngines(configs, **kind | options)
