"""Which steps of a group compute whole experts."""

import pytest

from shoal.runtime.whole_experts import WholeExperts, parse

QWEN3 = {"experts": 128, "top_k": 8, "inner": 768, "members": 2, "largest": 8192, "bits": 16}
"""Qwen3-30B-A3B on two GPUs: an expert has a sixteenth of a step's tokens on average."""


def test_by_default_it_depends_on_how_many_tokens_an_expert_has() -> None:
    assert WholeExperts().steps(**QWEN3) == range(64, 513)
    assert WholeExperts().steps(**{**QWEN3, "experts": 32}) == range(16, 129)


def test_by_default_larger_groups_larger_experts_and_experts_in_fp8_have_shares() -> None:
    assert not WholeExperts().steps(**{**QWEN3, "members": 4})
    assert not WholeExperts().steps(**{**QWEN3, "inner": 1408})
    assert not WholeExperts().steps(**{**QWEN3, "bits": 8})
    asked = parse("64")
    assert asked is not None
    assert asked.steps(**{**QWEN3, "members": 4, "inner": 1408, "bits": 8}) == range(64, 8193)


@pytest.mark.parametrize(
    ("spelled", "expected"),
    [("0", range(8193)), ("100", range(100, 8193)), ("100-200", range(100, 201))],
)
def test_a_user_says_how_many_tokens_a_step_has(spelled: str, expected: range) -> None:
    when = parse(spelled)
    assert when is not None
    assert when.steps(**QWEN3) == expected


def test_no_step_needs_more_memory_than_the_largest() -> None:
    """Of a short largest step eight members compute shares, an eighth of the inner size."""
    asked = WholeExperts(64, 500, automatic=False)
    assert asked.steps(**{**QWEN3, "members": 8, "largest": 2048}) == range(64, 257)
    assert asked.steps(**{**QWEN3, "members": 8, "largest": 400}) == range(64, 401), "the largest"
    assert not WholeExperts(2000, 3000, automatic=False).steps(**{**QWEN3, "members": 8})


def test_never_and_auto() -> None:
    assert parse("never") is None
    assert parse("auto") == WholeExperts()


@pytest.mark.parametrize("spelled", ["", "always", "-5", "5-", "9-3", "1.5", "4-x"])
def test_anything_else_is_refused_by_name(spelled: str) -> None:
    with pytest.raises(ValueError, match=r"is neither auto, never, FROM nor FROM-TO|has no steps"):
        parse(spelled)
