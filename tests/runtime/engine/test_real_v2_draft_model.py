"""Speculative decoding by EAGLE's draft models on the V2 model runner.

The tokens are those without it, in DP, in TP2, in steps by sequence, after a pause and through
carries. So that the KV of
a draft model is compared, too, proposals are: they follow from a request's tokens, wherever it is.
"""

from typing import Any

import pytest

from tests.depth import among
from tests.runtime.engine import v2_program

pytestmark = pytest.mark.timeout(1200)

CASES = among([("eagle3", True)], ("eagle", True), ("eagle", False))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: " ".join(map(str, case)))
def result(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """One program for all of it: interpreted kernels are slow."""
    directory, (method, ahead) = tmp_path_factory.mktemp("v2"), request.param
    main = "tests.runtime.engine.v2_draft_model_main"
    return v2_program.run(main, directory, method, ahead) | {"ahead": ahead, "method": method}


def differing(result: dict[str, Any], phase: str) -> list[bool]:
    """Return of each length at which a request proposed in DP, too, whether it did otherwise."""
    pairs = zip(result["proposed"]["dp"], result["proposed"][phase], strict=True)
    return [
        proposed[known] != there[known]
        for there, proposed in pairs
        for known in there.keys() & proposed.keys()
    ]


def test_every_layout_generates_the_tokens_without_speculation(result: dict[str, Any]) -> None:
    assert result["runners"] == ["vllm.v1.worker.gpu.model_runner"]
    expected = result["expected"]
    assert len({tuple(output) for output in expected}) == len(expected)
    for phase in ("dp", "dp from the prefix cache", "tp2", "sp2", "paused", "carried"):
        assert result["tokens"][phase] == expected, phase
        assert result["drafts"][phase]["accepted"] > 0, phase
        assert result["drafts"][phase]["rejected"] > 0, phase
    for phase in ("tp2", "sp2"):
        assert result["drafts"][phase] == result["drafts"]["dp"], phase
    assert result["modes of sp2"] == ["sp"]
    assert result["carried in sp2"] > 0
    assert result["tokens"]["sampled and carried"] == result["expected sampled"]
    assert (min(result["deferred samples"]) > 0) is result["ahead"]
    assert min(result["carried"]) > 0
    assert result["computed again"] == [{}] * 3
    assert result["problems"] == []


def test_requests_take_the_kv_of_the_draft_model_along(result: dict[str, Any]) -> None:
    for phase in ("dp from the prefix cache", "tp2", "carried"):
        found = differing(result, phase)
        assert len(found) > 50, phase
        assert not any(found), phase
    assert any(differing(result, "with other KV")), "wrong KV of a draft model would not be noticed"
    assert result["tokens"]["with other KV"] == result["expected"]


def test_a_draft_model_finds_the_hidden_states_of_steps_by_sequence(
    result: dict[str, Any],
) -> None:
    found = differing(result, "sp2")
    assert len(found) > 50
    assert not any(found)
    wrong = "with other hidden states"
    assert result["tokens"][wrong] == result["expected"]
    if result["method"] == "eagle3":  # the other one reads what the tokens come from
        assert any(differing(result, wrong)), "wrong hidden states would not be noticed"


def test_seeded_requests_sample_the_same_however_steps_run(result: dict[str, Any]) -> None:
    in_tp, in_sp = (f"seeded in {mode}" for mode in ("tp2", "sp2"))
    assert result["tokens"][in_sp] == result["tokens"][in_tp] != result["expected"][:2]
    assert result["drafts"][in_sp] == result["drafts"][in_tp]
    assert result["drafts"][in_sp]["accepted"] > 0
    assert result["drafts"][in_sp]["rejected"] > 0


def test_members_of_a_group_propose_and_judge_alike(result: dict[str, Any]) -> None:
    assert result["propose alike"]
    assert result["sample alike"]


def test_what_groups_load_of_the_draft_model_is_counted(result: dict[str, Any]) -> None:
    assert result["owned"] == [{"dp": 0, "tp2": 0}] * 2, "the model's own weights are shared"
    for loaded in result["loaded"]:
        # Heads and MLP are divided, and what makes one hidden state of several is not.
        assert loaded["dp"] / 2 < loaded["tp2"] < loaded["dp"]
