"""The options of engines that share weights, of ``shoal serve`` and ``shoal simulate``."""

from argparse import ArgumentTypeError, BooleanOptionalAction, Namespace, _ActionsContainer
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.policies.static import MANUAL, STATIC_DP
from shoal.runtime.config import ENGINE_COUNTS
from shoal.runtime.node.supervisor import Say
from shoal.runtime.served_weights import MXFP4_QUANTISATIONS, schemes
from shoal.runtime.simulation.shape_files import FileError, ShapeFile
from shoal.server.errors import UserError
from shoal.server.options.experts_option import settled_experts
from shoal.server.options.promise_options import shape_of
from shoal.server.options.shift_options import BY_SEQUENCE

LOADED_BY_NAME = ("auto", "hf", "safetensors", "pt", "mistral", "dummy")
"""vLLM's load formats that hand out a checkpoint's tensors one by one, by the names of layers."""

LOADED_QUANTISED = ("fp8", "compressed-tensors", *sorted(MXFP4_QUANTISATIONS))
"""vLLM's names of quantisations of checkpoints whose weights engines can share. What vLLM quantises
as it loads it needs whole weights."""

AUTO = "auto"
"""With this value of ``--share-weights``, ``automatic_share`` chooses."""
_WITH_EXPERTS = (
    *("Qwen3MoeForCausalLM", "MixtralForCausalLM", "Glm4MoeForCausalLM"),
    "GptOssForCausalLM",
)
"""Architectures with experts whose engines share weights in tests. Those without are
``BY_SEQUENCE``."""
MOST_FOR_WEIGHTS = 0.9
"""The share of the memory that vLLM may take which weights may take: the rest is for KV, for what a
step computes and for graphs."""
USUAL_FOR_WEIGHTS = 0.75
"""The share that they may take without need. Above it there is so little KV that requests wait
longer for it than whole weights save (docs/benchmarks/share-weights.md)."""


def add_sharing_options(group: _ActionsContainer) -> None:
    """Add ``--share-weights``, which is None by default, and ``--move-memory``."""
    group.add_argument(
        "--share-weights",
        type=_share,
        choices=(AUTO, *ENGINE_COUNTS),
        help="how many engines share the weights of layers: each keeps one part of so many, and "
        f"reads the others' parts while it computes; {AUTO}: the fewest with which three quarters "
        f"of a GPU hold the weights (default: {AUTO} for the models it is tested on, else 1; with "
        "1 each keeps all)",
    )
    group.add_argument(
        "--move-memory",
        action=BooleanOptionalAction,
        default=False,
        help="let the policy give engines that share weights whole ones and less KV, and share "
        "them again, by what requests need (default: off)",
    )


def _share(text: str) -> int | str:
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is neither a number nor {AUTO}") from None


def sharing_settings(args: Namespace) -> dict[str, Any]:
    """Return the fields of ``NodeConfig`` that the options set."""
    return {"share_weights": args.share_weights, "move_memory": args.move_memory}


def settle_share(args: Namespace, config: Any, engines: int, memory: int, say: Say) -> None:
    """Choose how many engines share weights, where the user has left it open.

    If they share experts, groups divide these by number.

    Args:
        args: the parsed arguments, changed in place.
        config: vLLM's ``VllmConfig``.
        engines: of the node.
        memory: bytes of a GPU; 0: engines run on the CPU, where there is one memory for all.
        say: is told if they share what nobody asked them to.

    Raises:
        UserError: see ``automatic_share`` and ``settled_experts``.
    """
    asked = args.share_weights
    if asked is None and not _is_tested(args, config, engines):
        args.share_weights = 1
    if not isinstance(args.share_weights, int):
        args.share_weights = _chosen_share(args, config, engines, memory)
    if asked is None and args.share_weights > 1:
        say(
            f"--share-weights {args.share_weights}: whole weights would leave too little of each "
            "GPU's memory for KV (--share-weights 1 keeps them whole)"
        )
    if config.model_config.is_moe:
        args.whole_experts = settled_experts(args.whole_experts, args.share_weights)


def _chosen_share(args: Namespace, config: Any, engines: int, memory: int) -> int:
    """Return how many engines share weights; the arguments are those of ``settle_share``."""
    cache = config.cache_config
    chosen = cache.kv_cache_memory_bytes  # then vLLM does not ask how much it may take
    room = memory - chosen if memory and chosen else memory * cache.gpu_memory_utilization
    # The largest degree of SP is chosen later; the larger it is, the less engines may share.
    max_sp = args.max_sp if isinstance(args.max_sp, int) else engines
    limits: Sequence[float] = (MOST_FOR_WEIGHTS,)
    if not chosen:
        has_experts = config.model_config.is_moe
        limits = weight_limits(args.policy, args.max_group, has_experts=has_experts)
    return automatic_share(config, engines, room, max_sp, limits)


def weight_limits(
    policy: str, max_group: int | None, *, has_experts: bool = False
) -> Sequence[float]:
    """Return the shares of the memory that weights may take (see ``automatic_share``).

    DP alone is slow while it streams, so it has whole weights if they fit at all. So has a model
    with experts, because DP streams all of them for a step that computes with some.

    Args:
        policy: which begins.
        max_group: size of the largest group; None: all engines.
        has_experts: whether the model has.
    """
    forms_groups = policy not in (MANUAL.name, STATIC_DP.name) and max_group != 1
    if forms_groups and not has_experts:
        return USUAL_FOR_WEIGHTS, MOST_FOR_WEIGHTS
    return (MOST_FOR_WEIGHTS,)


def fewest_sharers(
    shape: ShapeFile, room: float, engines: int, max_sp: int, limits: Sequence[float]
) -> int | None:
    """Return ``automatic_share`` of a shape; None: its weights are above all limits."""
    counts = [count for count in ENGINE_COUNTS if count <= engines]
    for most in limits:
        for count in counts:
            if shape.kept_bytes(count, engines, max_sp) <= most * room:
                return count
    return None


def _is_tested(args: Namespace, config: Any, engines: int) -> bool:
    """Return whether engines may share weights without being asked to."""
    model = config.model_config
    return (
        (model.architecture in BY_SEQUENCE or model.architecture in _WITH_EXPERTS)
        and not (model.supports_multimodal_inputs or args.enable_lora)
        and args.speculative_config is None
        and not list(_problems(config, engines))
    )


def automatic_share(
    config: Any,
    engines: int,
    room: float,
    max_sp: int = 1,
    limits: Sequence[float] = (MOST_FOR_WEIGHTS,),
) -> int:
    """Return the fewest engines that have to share weights so that these keep within a limit.

    It is 1 for a model whose weights cannot be shared, or whose size is not known.

    Args:
        config: vLLM's ``VllmConfig``.
        engines: of the node.
        room: bytes of a GPU that vLLM may take; 0: it is not known.
        max_sp: see ``NodeConfig.max_sp``.
        limits: shares of ``room`` that weights may take; the first with which there is a number
            counts.

    Raises:
        UserError: they are above all limits at every number.
    """
    model = config.model_config
    cannot = not _is_known(config) or model.use_mla
    if cannot or not room or (model.is_moe and not _has_known_experts(config)):
        return 1
    try:
        shape = shape_of(model, config.cache_config.cache_dtype)
    except FileError:  # nobody knows how large it is
        return 1
    found = fewest_sharers(shape, room, engines, max_sp, limits)
    if found is not None:
        return found
    least = shape.kept_bytes(engines, engines, max_sp) / 1e9
    raise UserError(
        f"--share-weights {AUTO}: {model.model} has {shape.weight_bytes / 1e9:.0f} GB of weights; "
        f"with --share-weights {engines} each engine keeps {least:.0f} GB, and a GPU has room "
        f"for {limits[-1] * room / 1e9:.0f} GB"
    )


def _is_known(config: Any) -> bool:
    """Return whether engines can share weights that are quantised as a model's are, if at all.

    Args:
        config: vLLM's ``VllmConfig``.
    """
    quantisation = config.model_config.quantization
    if quantisation is None:
        return True
    return quantisation in LOADED_QUANTISED and not _is_made_while_loading(config.quant_config)


def _is_made_while_loading(quantisation: Any) -> bool:
    """Return whether vLLM quantises what the checkpoint has in more bits, or otherwise."""
    again = getattr(quantisation, "online_quantization_config", None)
    return quantisation.get_name() == "online" or again is not None


def _has_known_experts(config: Any) -> bool:
    """Return whether engines can share experts that are quantised as a model's are.

    What has one scale for a whole weight, vLLM changes once it is loaded.
    """
    found, quantisation = config.quant_config, config.model_config.quantization
    if quantisation == "compressed-tensors":
        weights = [scheme["weights"] for scheme in schemes(found).values()]
        return all(each is None or each.strategy != "tensor" for each in weights)
    in_blocks = getattr(found, "weight_block_size", None) is not None
    return quantisation is None or quantisation in MXFP4_QUANTISATIONS or in_blocks


def check_share(share: int | str | None, engines: int) -> None:
    """Refuse more sharing than there are engines.

    Args:
        share: ``--share-weights``: a number, ``AUTO``, or None.
        engines: of the node.

    Raises:
        UserError: there are not so many engines.
    """
    if isinstance(share, int) and share > engines:
        raise UserError(f"--share-weights {share}: there are only {engines} engines")


def check_shared_model(share: int, config: Any, groups: int) -> None:
    """Refuse models whose weights engines cannot share.

    Engines check the rest when they load, such as which activation an MLP has.

    Args:
        share: ``--share-weights``.
        config: vLLM's ``VllmConfig``.
        groups: ``NodeConfig.weight_groups``.

    Raises:
        UserError: the message says why.
    """
    for problem in _problems(config, groups) if share > 1 else ():
        raise UserError(f"--share-weights {share}: {problem}")


def _problems(config: Any, groups: int) -> Iterator[str]:
    """Yield what keeps engines from sharing a model's weights (see ``check_shared_model``)."""
    model, load_format = config.model_config, config.load_config.load_format
    experts = model.get_num_experts()
    # Engines look at the MLPs that models with experts have beside these.
    size = 0 if experts else getattr(model.hf_text_config, "intermediate_size", 0)
    block, _ = getattr(config.quant_config, "weight_block_size", None) or (1, 1)
    problems = {
        f"{model.model} has latent attention (MLA)": model.use_mla,
        f"{model.model} is quantised ({model.quantization}), and not by its checkpoint in FP8, or "
        "as GPT-OSS in MXFP4": not _is_known(config),
        f"{model.model} has experts in FP8, and one scale for each weight": (
            experts > 0 and _is_known(config) and not _has_known_experts(config)
        ),
        f"{model.model} has {experts} experts, which make no {groups} equal parts": (
            experts % groups != 0
        ),
        f"{model.model} names no size of its MLPs": (
            not experts and (not isinstance(size, int) or not size)
        ),
        f"the MLPs of {model.model} have {size} inner units, which make no {groups} equal parts": (
            isinstance(size, int) and size % groups != 0
        ),
        f"the scales of blocks of {block} inner units of {model.model} have {size} of them, which "
        f"make no {groups} equal parts": (
            isinstance(size, int) and size % groups == 0 and size % (groups * block) != 0
        ),
        f"--load-format {load_format} is not supported": load_format not in LOADED_BY_NAME,
    }
    yield from (problem for problem, holds in problems.items() if holds)
