"""Speculative decoding by n-grams on the V2 model runner, vLLM's default on GPUs.

The tokens are those without it, in DP, in TP2, in steps by sequence, after a pause and through
carries. How many drafts are accepted is what follows from the tokens (``n_grams``). With
``ngram_gpu``, vLLM schedules steps ahead, so runners find the drafts themselves; with ``ngram`` it
does not.
"""

from typing import Any

import pytest

from tests.depth import among
from tests.runtime.engine import n_grams, v2_program

pytestmark = pytest.mark.timeout(1200)


KINDS = among([], n_grams.ON_DEVICE, "ngram")
"""None by default, because it takes minutes: ``test_real_v2_draft_model`` checks drafts on V2."""


@pytest.fixture(scope="module", params=KINDS)
def result(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """One program for all of it: interpreted kernels are slow."""
    directory, main = tmp_path_factory.mktemp("v2"), "tests.runtime.engine.v2_speculation_main"
    found = v2_program.run(main, directory, request.param)
    return found | {"ahead": request.param == n_grams.ON_DEVICE}


def test_every_layout_generates_the_tokens_without_speculation(result: dict[str, Any]) -> None:
    assert result["runners"] == ["vllm.v1.worker.gpu.model_runner"]
    expected = result["expected"]
    assert len({tuple(output) for output in expected}) == len(expected)
    for phase in ("dp", "tp2", "tp2 from the prefix cache", "sp2", "paused", "dp again"):
        assert result["tokens"][phase] == expected, phase
    assert result["problems"] == []


def test_the_statistics_are_those_of_the_tokens(result: dict[str, Any]) -> None:
    assert result["expected drafts"]["accepted"] > 0
    assert result["expected drafts"]["rejected"] > 0
    for phase in ("dp", "tp2", "sp2"):
        assert result["drafts"][phase] == result["expected drafts"], phase
    assert result["modes of sp2"] == ["sp"]
    assert result["carried in sp2"] > 0


def test_seeded_requests_sample_the_same_however_steps_run(result: dict[str, Any]) -> None:
    in_tp, in_sp = (f"seeded in {mode}" for mode in ("tp2", "sp2"))
    assert result["tokens"][in_sp] == result["tokens"][in_tp] != result["expected"][:2]
    assert result["drafts"][in_sp] == result["drafts"][in_tp]
    assert result["drafts"][in_sp]["accepted"] > 0
    assert result["drafts"][in_sp]["rejected"] > 0


def test_carried_requests_go_on_without_their_drafts(result: dict[str, Any]) -> None:
    assert result["tokens"]["carried"] == result["expected"]
    assert result["tokens"]["sampled and carried"] == result["expected sampled"]
    assert min(result["carried"]) > 0
    assert result["computed again"] == [{}] * 3
    for phase in ("carried", "sampled and carried"):
        assert result["drafts"][phase]["accepted"] > 0, phase


def test_grammars_penalties_and_log_probabilities_change_no_token(result: dict[str, Any]) -> None:
    expected = result["expected sampled"]
    assert expected[0] != result["expected"][0]
    assert expected[1] == result["expected"][1]
    assert expected[2] != result["expected"][2]
    for phase in ("sampled in dp", "sampled in tp2"):
        assert result["tokens"][phase] == expected, phase
        assert result["drafts"][phase]["accepted"] > 0, phase
    # Both members are told to sample such a step once the drafts that it checks are known.
    assert (min(result["deferred samples"]) > 0) is result["ahead"]


def test_members_of_a_group_judge_drafts_alike(result: dict[str, Any]) -> None:
    assert result["sample alike"]


def test_drafts_of_other_requests_are_noticed(result: dict[str, Any]) -> None:
    """Proposed to the wrong request, few are right; if they count as right, tokens are wrong."""
    proposed = "drafts of others proposed"
    assert result["tokens"][proposed] == result["expected"]
    assert result["drafts"][proposed]["accepted"] < result["expected drafts"]["accepted"]
    assert result["tokens"]["drafts of others judged"] != result["expected"]
