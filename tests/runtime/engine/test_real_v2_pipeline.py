"""Pipelines with the V2 model runner: the tokens are DP's, whatever happens to other requests.

``SHOAL_TESTS=all`` adds four engines, with all pipelines that they can
form and a few random operations. For many of them, run ``v2_pipeline_main`` with their number.
"""

from typing import Any

import pytest

from tests.depth import among
from tests.runtime.engine import v2_program
from tests.runtime.engine.v2_main import SAMPLED

pytestmark = pytest.mark.timeout(1200)

OPERATIONS = 40
"""Random ones."""
ENGINES = among([2], 4)


@pytest.fixture(scope="module", params=ENGINES)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One program for all of it: interpreted kernels are slow."""
    directory = tmp_path_factory.mktemp("v2-pipelines")
    program = "tests.runtime.engine.v2_pipeline_main"
    return v2_program.run(program, directory, request.param, OPERATIONS)


def test_pipelines_generate_dps_tokens(result: dict[str, Any]) -> None:
    """In chunks, from the prefix cache, one request after the other, and beside aborted ones.

    Two engines share weights, and then have their stages whole.
    """
    assert result["runners"] == ["vllm.v1.worker.gpu.model_runner"]
    assert result["owned"] == 0
    tokens = result["tokens"]
    assert {"pp2", "pp2 from the prefix cache", "each alone", "with aborts"} <= tokens.keys()
    whole = tokens.pop("whole stages", tokens["dp"] * 2)
    assert whole == tokens["dp"] * 2
    for name, outputs in tokens.items():
        assert outputs == tokens["dp"][: len(outputs)], name
    assert all(tokens.values())
    assert result["problems"] == []


def test_the_first_stage_computes_the_tokens_that_it_is_told(result: dict[str, Any]) -> None:
    """The test above can fail: with other tokens, only the first ones are the same."""
    told = zip(result["wrong tokens told"], result["tokens"]["dp"], strict=False)
    assert [(wrong[0] == right[0], wrong == right) for wrong, right in told] == [(True, False)] * 2


def test_steps_follow_each_other_through_the_stages(result: dict[str, Any]) -> None:
    """The first stage begins a step of other requests while the last one has a step."""
    assert result["apart"]
    assert all(result["apart"])


def test_requests_go_along_with_their_kv(result: dict[str, Any]) -> None:
    """With seeds, penalties, grammars and log probabilities, into pipelines and out of them."""
    sampled, switches = result["sampled"], result["switches"]
    assert sampled["carried"] == sampled["plain"]
    greedy = zip(sampled["plain"], result["tokens"]["dp"], strict=True)
    assert [tokens[: len(plain)] != plain for tokens, plain in greedy] == [True, True, True, False]
    assert switches["carried"][0] == len(SAMPLED)
    assert all(switches["carried"][:2]), "some end before the last carries of four engines"
    assert all(counts == [0, 0, {}] for counts in switches["not carried"])
    assert switches["ahead"], "blocks were copied ahead, too"


def test_no_random_operation_changes_a_token(result: dict[str, Any]) -> None:
    if "life" not in result:
        pytest.skip("two engines lead no random life")
    life = result["life"]
    assert (life["wrong"], life["problems"], life["lent"]) == ([], [], 0)
    assert sum(life["counts"].values()) >= OPERATIONS
    ways = [way.split(" to ") for way in life["directions"]]
    assert any(source == "dp" and "pp" in target for source, target in ways)
    assert any("pp" in source and target == "dp" for source, target in ways)
