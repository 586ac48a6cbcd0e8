from argparse import ArgumentParser

import pytest

from shoal.runtime.whole_experts import WholeExperts
from shoal.server.options.experts_option import add_experts_option
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
