from argparse import ArgumentParser

import pytest

from shoal.runtime.whole_experts import WholeExperts
from shoal.server.options.experts_option import add_experts_option, whole_experts


def parsed(*argv: str) -> str:
    parser = ArgumentParser()
    add_experts_option(parser.add_argument_group("Shoal"))
    found: str = parser.parse_args(argv).whole_experts
    return found


def test_the_default_has_whole_experts_on_gpus_alone() -> None:
    assert whole_experts(parsed(), on_gpus=True) == WholeExperts()
    assert whole_experts(parsed(), on_gpus=False) is None


def test_steps_that_are_asked_for_are_so_everywhere() -> None:
    for on_gpus in (False, True):
        assert whole_experts(parsed("--whole-experts", "never"), on_gpus=on_gpus) is None
        found = whole_experts(parsed("--whole-experts", "64-512"), on_gpus=on_gpus)
        assert found == WholeExperts(64, 512, per_expert=False)


def test_another_word_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--whole-experts", "often")
    assert "'often' is neither auto, never, FROM nor FROM-TO" in capsys.readouterr().err
