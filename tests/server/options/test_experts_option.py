from argparse import ArgumentParser

import pytest

from shoal.runtime.whole_experts import ALWAYS, WholeExperts
from shoal.server.errors import UserError
from shoal.server.options.experts_option import add_experts_option, settled_experts
from shoal.server.options.serve_options import model_defaults


def parsed(*argv: str, on_cpu: bool = False) -> WholeExperts | None:
    parser = ArgumentParser()
    add_experts_option(parser.add_argument_group("Shoal"))
    parser.set_defaults(**model_defaults(2, on_cpu=on_cpu, demo=False))
    found: WholeExperts | None = parser.parse_args(argv).whole_experts
    return found


def test_the_default_has_whole_experts_on_gpus_alone() -> None:
    assert parsed() == WholeExperts()
    assert parsed(on_cpu=True) is None


def test_steps_that_are_asked_for_are_so_everywhere() -> None:
    for on_cpu in (False, True):
        assert parsed("--whole-experts", "never", on_cpu=on_cpu) is None
        found = parsed("--whole-experts", "64-512", on_cpu=on_cpu)
        assert found == WholeExperts(64, 512, automatic=False)


def test_another_word_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--whole-experts", "often")
    assert "'often' is neither auto, never, FROM nor FROM-TO" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [None, WholeExperts(), ALWAYS])
def test_engines_that_share_experts_have_whole_ones_in_all_steps(
    asked: WholeExperts | None,
) -> None:
    assert settled_experts(asked, 2) == ALWAYS
    assert settled_experts(asked, 1) == asked


def test_engines_that_share_experts_have_no_shares_of_each_for_other_steps() -> None:
    with pytest.raises(UserError, match=r"^--whole-experts: with --share-weights 2 engines keep"):
        settled_experts(WholeExperts(64, 512, automatic=False), 2)
