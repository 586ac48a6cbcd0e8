import pytest
from vllm.model_executor.layers.quantization import get_quantization_config

from shoal.runtime.served_weights import REPACKED_QUANTISATIONS


@pytest.mark.parametrize("name", sorted(REPACKED_QUANTISATIONS))
def test_layers_know_a_repacked_quantisation_by_a_name_that_is_served(name: str) -> None:
    """A model's configuration may call it by another name than the methods of its layers do."""
    assert get_quantization_config(name).get_name() in REPACKED_QUANTISATIONS
