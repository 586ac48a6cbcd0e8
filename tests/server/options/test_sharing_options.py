"""What the command line says of shared weights, and which models it refuses."""

from argparse import ArgumentParser
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.server.errors import UserError
from shoal.server.options.sharing_options import (
    add_sharing_option,
    check_share,
    check_shared_model,
)


def config(load_format: str = "auto", size: int = 512, **model: Any) -> SimpleNamespace:
    """Return what the check reads of a ``VllmConfig``."""
    known = {"model": "m", "is_moe": False, "use_mla": False, "quantization": None}
    text = SimpleNamespace(intermediate_size=size) if size else SimpleNamespace()
    return SimpleNamespace(
        model_config=SimpleNamespace(**known | model, hf_text_config=text),
        load_config=SimpleNamespace(load_format=load_format),
    )


def test_engines_share_nothing_unless_asked_for() -> None:
    parser = ArgumentParser()
    add_sharing_option(parser)
    assert parser.parse_args([]).share_weights == 1
    assert parser.parse_args(["--share-weights", "4"]).share_weights == 4


def test_there_are_as_many_engines_as_share() -> None:
    check_share(4, 4)
    with pytest.raises(UserError, match="--share-weights 4: there are only 2 engines"):
        check_share(4, 2)


@pytest.mark.parametrize(
    ("refused", "groups", "why"),
    [
        (config(is_moe=True), 2, "m has experts"),
        (config(use_mla=True), 2, r"m has latent attention \(MLA\)"),
        (config(quantization="fp8"), 2, r"m is quantised \(fp8\)"),
        (config(size=0), 2, "m names no size of its MLPs"),
        (config(size=10), 4, "have 10 inner units, which make no 4 equal parts"),
        (config("tensorizer"), 2, "--load-format tensorizer is not supported"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(refused: Any, groups: int, why: str) -> None:
    with pytest.raises(UserError, match=rf"^--share-weights 2: .*{why}$"):
        check_shared_model(2, refused, groups)
    check_shared_model(1, refused, groups)


def test_dense_models_are_shared() -> None:
    check_shared_model(4, config(), 8)
