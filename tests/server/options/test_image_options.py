"""Images alone are served, and not beside what no test has run with them."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.server.errors import UserError
from shoal.server.options.image_options import check_images_and_layouts, images_alone

ARGS: dict[str, Any] = {"max_sp": 1, "max_pp": 1, "share_weights": 1, "enable_lora": False}
MODEL: dict[str, Any] = {
    "model": "m",
    "supports_multimodal_inputs": True,
    "quantization": None,
    "is_moe": False,
}


def check(model: dict[str, Any] | None = None, speculation: Any = None, **args: Any) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(**MODEL | (model or {})), speculative_config=speculation
    )
    check_images_and_layouts(Namespace(**ARGS | args), config)


@pytest.mark.parametrize(
    ("asked", "limits"),
    [
        ({}, {"video": 0, "audio": 0}),
        ({"image": 3}, {"video": 0, "audio": 0, "image": 3}),
        ({"video": 0}, {"video": 0, "audio": 0}),
        ({"image": {"count": 2, "width": 64}, "audio": {"count": 0}}, None),
    ],
)
def test_prompts_have_images_and_nothing_else(
    asked: dict[str, Any], limits: dict[str, Any] | None
) -> None:
    expected = {"video": 0, "audio": 0, **asked} if limits is None else limits
    assert images_alone(asked) == expected


@pytest.mark.parametrize("asked", [{"video": 1}, {"image": 1, "audio": 2}, {"video": {"width": 1}}])
def test_other_modalities_are_refused_by_name(asked: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"--limit-mm-per-prompt: (video|audio) is not "):
        images_alone(asked)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"max_sp": 2}, "--max-sp 2"),
        ({"max_pp": 2}, "--max-pp 2"),
        ({"share_weights": 2}, "--share-weights 2"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"speculation": object()}, "--speculative-config"),
        ({"model": {"quantization": "fp8"}}, "m is quantised .fp8."),
        ({"model": {"is_moe": True}}, "m is a mixture-of-experts model"),
    ],
)
def test_what_no_test_has_run_with_images_is_refused(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"^{named}: not supported with images; --language-model-o"):
        check(**asked)
    text = (asked.get("model") or {}) | {"supports_multimodal_inputs": False}
    check(**asked | {"model": text})


def test_a_model_takes_images() -> None:
    check()
