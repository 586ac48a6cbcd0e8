"""Tokens that are made up tell when one is lost, repeated or out of order."""

from shoal.runtime.engine.fake.fake_tokens import expected_tokens


def test_tokens_depend_on_prompt_and_position_only() -> None:
    assert expected_tokens([1, 2, 3], 50) == expected_tokens([1, 2, 3], 60)[:50]
    assert expected_tokens([1, 2, 3], 50) != expected_tokens([1, 2, 4], 50)
    tokens = expected_tokens([1, 2, 3], 50)
    assert all(tokens[k : k + 2] != tokens[k + 1 : k + 3] for k in range(48))
