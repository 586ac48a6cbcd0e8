"""What the command line says of shared weights, and which models it refuses."""

from argparse import ArgumentParser, Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.runtime.whole_experts import ALWAYS, WholeExperts
from shoal.server.errors import UserError
from shoal.server.options.sharing_options import (
    AUTO,
    add_sharing_options,
    check_share,
    check_shared_model,
    settle_share,
)


def config(
    load_format: str = "auto", size: int = 512, found: Any = None, experts: int = 0, **model: Any
) -> SimpleNamespace:
    """Return what the check reads of a ``VllmConfig``; ``found`` is its quantisation's."""
    known = {"model": "m", "use_mla": False, "quantization": None}
    known["get_num_experts"] = lambda: experts
    text = SimpleNamespace(intermediate_size=size) if size else SimpleNamespace()
    return SimpleNamespace(
        model_config=SimpleNamespace(**known | model, hf_text_config=text),
        load_config=SimpleNamespace(load_format=load_format),
        quant_config=found,
    )


def fp8(*, is_loaded: bool = True, block: int = 0) -> SimpleNamespace:
    """Return what is read of vLLM's ``Fp8Config``, or of its ``OnlineQuantizationConfig``."""
    size, name = [block, block] if block else None, "fp8" if is_loaded else "online"
    return SimpleNamespace(weight_block_size=size, get_name=lambda: name)


def tensors(strategy: str = "channel", again: str | None = None) -> SimpleNamespace:
    """Return what is read of vLLM's ``CompressedTensorsConfig``."""
    name = "compressed-tensors"
    scheme = {"weights": SimpleNamespace(strategy=strategy), "input_activations": None}
    return SimpleNamespace(
        online_quantization_config=again,
        get_name=lambda: name,
        target_scheme_map={"Linear": scheme},
    )


def mxfp4() -> SimpleNamespace:
    """Return what is read of vLLM's ``GptOssMxfp4Config``."""
    return SimpleNamespace(get_name=lambda: "gpt_oss_mxfp4")


def test_the_option_is_a_number_or_auto(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    add_sharing_options(parser)
    given = (["--share-weights", "4"], ["--share-weights", "auto"], [])
    assert [parser.parse_args(each).share_weights for each in given] == [4, AUTO, None]
    for value in ("3", "all"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--share-weights", value])
    assert "'all' is neither a number nor auto" in capsys.readouterr().err


class Model:
    """Of a ``ModelConfig`` what says how large a model is: that of Llama 3 70B, 141 GB."""

    model, dtype, architecture = "m", "torch.bfloat16", "LlamaForCausalLM"
    quantization: str | None = None
    is_moe = use_mla = supports_multimodal_inputs = False
    max_model_len = 8192
    hf_text_config = SimpleNamespace(
        num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672, hidden_size=8192
    )

    def get_num_experts(self) -> int:
        return 0

    def get_total_num_hidden_layers(self) -> int:
        return 80

    def get_hidden_size(self) -> int:
        return 8192

    def get_vocab_size(self) -> int:
        return 128256

    def get_total_num_kv_heads(self) -> int:
        return 8

    def get_head_size(self) -> int:
        return 128


def chosen(
    gigabytes: int, engines: int, share: int | str | None = AUTO, **args: Any
) -> int | str | None:
    """Return what becomes of an option on GPUs with so much memory."""
    said = args.pop("said", [])
    config = SimpleNamespace(
        model_config=args.pop("model", Model()),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            gpu_memory_utilization=args.pop("utilization", 0.9),
            kv_cache_memory_bytes=args.pop("kv_bytes", None),
        ),
        load_config=SimpleNamespace(load_format=args.pop("load_format", "auto")),
        quant_config=args.pop("found", None),
    )
    others = {"max_sp": 1, "enable_lora": False, "speculative_config": None}
    others |= {"policy": "adaptive", "max_group": None, "whole_experts": WholeExperts()}
    given = Namespace(**{"share_weights": share} | others | args)
    settle_share(given, config, engines, gigabytes * 10**9, said.append)
    found: int | str | None = given.share_weights
    return found


@pytest.mark.parametrize("share", [None, AUTO])
def test_the_fewest_share_with_which_weights_leave_room(share: str | None) -> None:
    assert chosen(212, 2, share) == 1
    assert chosen(192, 2, share) == 2, "whole ones fit, and leave little"
    assert chosen(150, 2, share) == 2
    assert chosen(150, 8, share) == 2, "no more than have to"
    assert chosen(90, 2, share) == 2, "they leave little at every number"
    assert chosen(80, 4, share) == 4
    assert chosen(80, 4, share=1) == 1, "the user knows better"
    assert chosen(0, 4, share) == 1, "on CPUs"


@pytest.mark.parametrize("alone", [{"policy": "manual"}, {"policy": "static-dp"}, {"max_group": 1}])
def test_weights_stay_whole_if_they_fit_where_no_groups_are_formed(alone: dict[str, Any]) -> None:
    assert chosen(192, 2, None, **alone) == 1
    assert chosen(150, 2, None, **alone) == 2


def test_who_chooses_the_bytes_of_kv_needs_no_more() -> None:
    assert chosen(192, 2, None, kv_bytes=30 * 10**9, utilization=0.1) == 1
    assert chosen(192, 2, None, kv_bytes=60 * 10**9, utilization=0.1) == 2
    assert chosen(0, 2, None, kv_bytes=10**9) == 1, "on CPUs"


def test_a_line_says_that_engines_share_what_nobody_asked_them_to() -> None:
    said = list[str]()
    assert [chosen(*sizes, said=said) for sizes in ((212, 2, None), (192, 2), (192, 2, 2))]
    assert said == []
    chosen(192, 2, None, said=said)
    (line,) = said
    assert line.startswith("--share-weights 2: ")


class Experts(Model):
    """Of a ``ModelConfig`` the same of Qwen3-30B-A3B: 61 GB."""

    architecture, is_moe = "Qwen3MoeForCausalLM", True
    hf_text_config = SimpleNamespace(
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=6144,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    )

    def get_num_experts(self) -> int:
        return 128

    def get_num_experts_per_tok(self) -> int:
        return 8

    def get_total_num_hidden_layers(self) -> int:
        return 48

    def get_hidden_size(self) -> int:
        return 2048

    def get_vocab_size(self) -> int:
        return 151936

    def get_total_num_kv_heads(self) -> int:
        return 4


@pytest.mark.parametrize("share", [None, AUTO])
def test_models_with_experts_share_weights_that_do_not_fit(share: str | None) -> None:
    assert chosen(80, 2, share, model=Experts()) == 1, "they leave little"
    assert chosen(64, 2, share, model=Experts()) == 2
    quantised = Experts()
    quantised.quantization = "fp8"
    assert chosen(40, 2, share, model=quantised, found=fp8(block=128)) == 1
    assert chosen(30, 2, share, model=quantised, found=fp8(block=128)) == 2
    assert chosen(30, 2, share, model=quantised, found=fp8()) == 1, "scales of tensors"
    quantised.quantization, quantised.architecture = "gpt_oss_mxfp4", "GptOssForCausalLM"
    found = [chosen(size, 2, share, model=quantised, found=mxfp4()) for size in (24, 18)]
    assert found == [1, 2]


def test_groups_of_engines_that_share_experts_have_whole_ones() -> None:
    for model, whole in ((Experts(), ALWAYS), (Model(), WholeExperts())):
        given = Namespace(share_weights=2, whole_experts=WholeExperts())
        settle_share(given, SimpleNamespace(model_config=model), 2, 80 * 10**9, print)
        assert given.whole_experts == whole


class Untested(Model):
    """A model of another kind."""

    architecture = "FalconForCausalLM"


class Images(Model):
    """A model that takes images."""

    supports_multimodal_inputs = True


class Odd(Model):
    """A model whose MLPs make no equal parts."""

    hf_text_config = SimpleNamespace(**{**vars(Model.hf_text_config), "intermediate_size": 28671})


@pytest.mark.parametrize(
    "others",
    [
        {"enable_lora": True},
        {"speculative_config": {"method": "ngram"}},
        {"load_format": "gguf"},
        {"model": Odd()},
        {"model": Untested()},
        {"model": Images()},
    ],
)
def test_what_is_not_tested_with_shared_weights_has_them_only_if_asked_for(
    others: dict[str, Any],
) -> None:
    assert chosen(150, 2, None, **others) == 1
    assert chosen(150, 2, AUTO, **others) == 2


def test_weights_that_fit_nowhere_are_refused_with_their_size() -> None:
    line = (
        r"^--share-weights auto: m has 141 GB of weights; with --share-weights 2 "
        r"each engine keeps 72 GB, and a GPU has room for 65 GB$"
    )
    with pytest.raises(UserError, match=line):
        chosen(80, 2)


def test_models_that_cannot_be_shared_are_not() -> None:
    quantised = Model()
    quantised.quantization = "fp8"
    assert chosen(80, 4, model=quantised, found=fp8(is_loaded=False)) == 1


def test_weights_in_fp8_need_half_the_memory() -> None:
    quantised = Model()
    quantised.quantization = "fp8"
    assert chosen(80, 4, model=quantised, found=fp8()) == 2
    assert chosen(150, 4, model=quantised, found=fp8()) == 1


def test_there_are_as_many_engines_as_share() -> None:
    check_share(4, 4)
    check_share(AUTO, 1)
    with pytest.raises(UserError, match="--share-weights 4: there are only 2 engines"):
        check_share(4, 2)


@pytest.mark.parametrize(
    ("refused", "groups", "why"),
    [
        (config(experts=60), 8, "m has 60 experts, which make no 8 equal parts"),
        (
            config(experts=64, quantization="fp8", found=fp8()),
            2,
            "m has experts in FP8, and one scale for each weight",
        ),
        (
            config(experts=64, quantization="compressed-tensors", found=tensors("tensor")),
            2,
            "m has experts in FP8, and one scale for each weight",
        ),
        (config(use_mla=True), 2, r"m has latent attention \(MLA\)"),
        (config(quantization="gptq"), 2, r"m is quantised \(gptq\), and not by its .* MXFP4"),
        (config(quantization="fp8_per_block"), 2, r"m is quantised \(fp8_per_block\), and not .*"),
        (config(quantization="fp8", found=fp8(is_loaded=False)), 2, r"m is quantised \(fp8\), .*"),
        (
            config(quantization="compressed-tensors", found=tensors(again="fp8_per_tensor")),
            2,
            r"m is quantised \(comp.*",
        ),
        (
            config(quantization="fp8", found=fp8(block=128)),
            8,
            "the scales of blocks of 128 inner units of m have 512 .*, which make no 8 equal parts",
        ),
        (config(size=0), 2, "m names no size of its MLPs"),
        (config(size=10), 4, "have 10 inner units, which make no 4 equal parts"),
        (config("tensorizer"), 2, "--load-format tensorizer is not supported"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(refused: Any, groups: int, why: str) -> None:
    with pytest.raises(UserError, match=rf"^--share-weights 2: .*{why}$"):
        check_shared_model(2, refused, groups)
    check_shared_model(1, refused, groups)


@pytest.mark.parametrize(
    "shared",
    [
        config(),
        config(quantization="fp8", found=fp8()),
        config(quantization="fp8", found=fp8(block=128), size=1024),
        config(quantization="compressed-tensors", found=tensors()),
        config(experts=8, size=10),
        config(experts=8, quantization="fp8", found=fp8(block=128), size=10),
        config(experts=8, quantization="compressed-tensors", found=tensors("block")),
        config(experts=8, quantization="compressed-tensors", found=tensors("channel")),
        config(experts=8, quantization="gpt_oss_mxfp4", found=mxfp4()),
    ],
)
def test_others_are_shared(shared: Any) -> None:
    check_shared_model(4, shared, 8)
