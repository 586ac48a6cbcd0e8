"""GPT-OSS's experts in MXFP4: vLLM packs DP's for its kernel, other layouts read parts of these.

What an expert is packed to depends on that expert alone, and experts follow each other in memory.
So a member of a group may have a range of whole experts (expert parallel), whose bytes are DP's
own. For some kernels a share of every expert is a view, too (``mxfp4_shares``). Whether all of this
holds depends on the kernel, the GPU and the shape, so each start makes sure: vLLM packs two experts
alone as well, and shares of these two, and each byte must be where the range of these two, and
their share, is in what was packed for all.
"""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.utils.mxfp4_utils import (
    mx_scale_kwargs,
    weight_mx_scale,
)
from vllm.platforms import current_platform

from shoal.runtime.engine.kernels.expert_kernels import PlainExperts
from shoal.runtime.engine.kernels.expert_methods import InLayers
from shoal.runtime.engine.kernels.mxfp4_shares import AS_STORED, FOR_HOPPER, Cuts, Packed
from shoal.runtime.served_weights import MXFP4_BACKENDS

KERNELS = (
    Mxfp4MoeBackend.TRITON,
    Mxfp4MoeBackend.MARLIN,
    Mxfp4MoeBackend.FLASHINFER_TRTLLM_MXFP4_BF16,
    Mxfp4MoeBackend.FLASHINFER_TRTLLM_MXFP4_MXFP8,
)
"""Those for which vLLM packs each expert by itself: ``MXFP4_BACKENDS`` names them."""
HOPPER = 90
"""vLLM's number of the generation of GPUs for which shares are known (``mxfp4_shares``)."""
ALIGNMENT = 16
"""Bytes. A range begins at a multiple: kernels and the GPU's copies (TMA) read so much at once."""

_OTHERS = f"--moe-backend can name another: {', '.join(MXFP4_BACKENDS)}"
"""What to do where vLLM's choice of a kernel is not served."""

_TENSORS = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_bias", "w2_bias")
"""What a layer has, in the order in which vLLM's conversion takes and returns it."""
_CONFIGS = {"w13_weight_scale": "w13_precision_config", "w2_weight_scale": "w2_precision_config"}
"""Attributes of vLLM's method that hold the scales which are packed for ``triton_kernels``."""


class Mxfp4Experts(InLayers, mxfp4.GptOssMxfp4MoEMethod):  # type: ignore[misc]
    """vLLM's method of GPT-OSS's experts, for DP and, with ``views``, for every other layout.

    Args:
        moe: vLLM's configuration of the layer.

    Attributes:
        views: whether the layer will have a range of DP's experts (``view``), and no bytes.

    Raises:
        NotImplementedError: vLLM would compute the experts by a kernel that is not served.
    """

    views = False

    @property
    def cuts(self) -> Cuts | None:
        """How experts can be divided among members; None: only by their number."""
        hopper = current_platform.is_device_capability(HOPPER)
        return FOR_HOPPER if self.mxfp4_backend == Mxfp4MoeBackend.TRITON and hopper else None

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        if self.mxfp4_backend not in KERNELS:
            raise NotImplementedError(
                f"{self.mxfp4_backend.value}, vLLM's kernel for these experts, may not pack each "
                f"by itself; {_OTHERS}"
            )

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """Create the tensors as a checkpoint has them."""
        where: AbstractContextManager[Any] = torch.device("meta") if self.views else nullcontext()
        with where:
            super().create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack DP's experts, or make the kernel that reads a range of these.

        Raises:
            NotImplementedError: what an expert is packed to depends on the others.
        """
        if self.views:
            self._make_kernel(layer)
            return
        experts, features = layer.w13_weight.shape[0], self.intermediate_size
        two = slice(experts - 2, experts)
        alone = self._pack(layer, two)
        shares = self._divided(features)
        divided = [self._pack(layer, two, share) for share in shares]
        super().process_weights_after_loading(layer)
        packed = packed_experts(layer)
        self._check_range(packed, two, experts, alone)
        for share, expected in zip(shares, divided, strict=True):
            self._check_share(packed, share, two, expected)
        _show(layer, packed)

    def compute(self, **arguments: Any) -> Any:
        """Return what vLLM's method computes."""
        stock = mxfp4.GptOssMxfp4MoEMethod
        return (stock.apply_monolithic if self.is_monolithic else stock.apply)(self, **arguments)

    def for_whole(self, moe: Any) -> "Mxfp4Experts":
        """Return the method of a layer that has other experts, of this configuration."""
        method = copy.copy(self)
        method.moe, method.moe_kernel, method.views = moe, None, True
        return method

    def pack(self, layer: nn.Module) -> dict[str, Packed]:
        """Return what vLLM packs of a layer, which has its experts as a checkpoint has them.

        Raises:
            NotImplementedError: what an expert is packed to depends on the others.
        """
        experts = layer.w13_weight.shape[0]
        two = slice(max(0, experts - 2), experts)
        packed = self._pack(layer, slice(0, experts))
        self._check_range(packed, two, experts, self._pack(layer, two))
        return packed

    def scale_configs(self, layer: nn.Module) -> dict[str, Any]:
        """Return the attributes of this method that ``have`` puts packed scales into.

        Args:
            layer: has some experts as a checkpoint has them.
        """
        converted = self._converted(layer, slice(0, 1))
        wrapped = {of: converted[key] for key, of in _CONFIGS.items()}
        return {of: config for of, config in wrapped.items() if hasattr(config, "flex_ctx")}

    def _check_range(
        self, packed: dict[str, Packed], own: slice, experts: int, expected: dict[str, Packed]
    ) -> None:
        for key in expected:
            if not _are_equal(range_of(packed[key], own, experts), expected[key]):
                raise self._refusal(f"the {key} of two experts unlike their range in that of all")

    def _divided(self, features: int) -> list[range]:
        """Return two shares that together are all features, if there are shares.

        The first ends where any other share may begin.
        """
        if self.cuts is None or features <= self.cuts.unit:
            return []
        return [range(self.cuts.unit), range(self.cuts.unit, features)]

    def _check_share(
        self, packed: dict[str, Packed], share: range, own: slice, expected: dict[str, Packed]
    ) -> None:
        assert self.cuts is not None
        for key, cut in self.cuts.of.items():
            if key not in packed:
                continue
            found = cut.take(packed[key], share)
            if not _are_alike(_of_some(found, own), expected[key]):
                raise self._refusal(f"the {key} of a share unlike the share of that of all")

    def _refusal(self, what: str) -> NotImplementedError:
        return NotImplementedError(
            f"{self.mxfp4_backend.value}, vLLM's kernel for these experts, packs {what}; {_OTHERS}"
        )

    def _pack(self, layer: nn.Module, own: slice, share: range | None = None) -> dict[str, Packed]:
        """Return what vLLM packs for its kernel if a layer has no other experts than these.

        Args:
            layer: has the experts as a checkpoint has them.
            own: which of them.
            share: their features; None: all.
        """
        converted = self._converted(layer, own, share)
        return {key: _unwrapped(value) for key, value in converted.items()}

    def _converted(
        self, layer: nn.Module, own: slice, share: range | None = None
    ) -> dict[str, Any]:
        """Return the same with the configurations that hold scales, where there are some."""
        part = nn.Module()
        part.params_dtype = layer.params_dtype
        for key in _TENSORS:
            tensor = layer._parameters.get(key)
            if tensor is not None and share is not None and key in AS_STORED.of:
                tensor = AS_STORED.of[key].take(tensor, share)
            copy = None if tensor is None else Parameter(tensor.data[own].clone(), False)
            part.register_parameter(key, copy)
        converted = mxfp4.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format(
            mxfp4_backend=self.mxfp4_backend,
            layer=part,
            _cache_permute_indices=self._cache_permute_indices,
            **{key: getattr(part, key) for key in _TENSORS},
        )
        found = zip(_TENSORS, converted, strict=True)
        return {key: value for key, value in found if value is not None}

    def view(self, layer: nn.Module, full: nn.Module, own: slice) -> None:
        """Let a layer of this method have the experts ``own`` of DP's layer ``full``.

        Raises:
            NotImplementedError: they cannot be read in place, or vLLM has chosen another kernel for
                this layout than for DP.
        """
        packed = self._packed(full)
        views = {key: range_of(packed[key], own, full.local_num_experts) for key in packed}
        self._note(full)
        self.have(layer, views)

    def view_share(self, layer: nn.Module, full: nn.Module, rank: int, members: int) -> None:
        """Let a layer of this method have a share of each expert of DP's layer ``full``.

        Raises:
            NotImplementedError: a share cannot be read in place, or vLLM has chosen another kernel
                for this layout than for DP.
        """
        packed = self._packed(full)
        if self.cuts is None:
            raise NotImplementedError(
                "vLLM divides each expert, and a share of a packed one is no view; "
                "--whole-experts 0 divides experts by number"
            )
        share = self.cuts.share(full.quant_method.intermediate_size, rank, members)
        views = {key: cut.take(packed[key], share) for key, cut in self.cuts.of.items()}
        if rank == 0:  # as vLLM's loader has it, the first member alone adds this bias
            views["w2_bias"] = packed["w2_bias"]
        self._note(full)
        self.have(layer, views)
        if rank > 0:
            layer.register_parameter("w2_bias", None)

    def _packed(self, full: nn.Module) -> dict[str, Packed]:
        whole = full.quant_method
        if whole.mxfp4_backend != self.mxfp4_backend:
            raise NotImplementedError(
                f"vLLM's kernel for these experts is {self.mxfp4_backend.value} in this layout, "
                f"and {whole.mxfp4_backend.value} in DP"
            )
        return packed_experts(full)

    def _note(self, full: nn.Module) -> None:
        """Note the configurations of scales that DP's layer has."""
        for attribute in _CONFIGS.values():
            setattr(self, attribute, getattr(full.quant_method, attribute))

    def have(self, layer: nn.Module, tensors: Mapping[str, Packed]) -> None:
        """Let a layer have packed experts (``InLayers.have``)."""
        for key in _TENSORS:
            layer._parameters.pop(key, None)
        for key, tensor in tensors.items():
            if key in _CONFIGS and not isinstance(tensor, torch.Tensor):
                config = getattr(self, _CONFIGS[key])
                setattr(self, _CONFIGS[key], replace(config, **mx_scale_kwargs(tensor)))
                continue
            is_plain = isinstance(tensor, torch.Tensor)
            setattr(layer, key, Parameter(tensor, requires_grad=False) if is_plain else tensor)
        _show(layer, tensors)

    def _make_kernel(self, layer: nn.Module) -> None:
        """Make the kernel, as vLLM's method does when it has packed the weights."""
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = mxfp4.make_mxfp4_moe_kernel(
            moe_quant_config=self.moe_quant_config,
            moe_config=self.moe,
            mxfp4_backend=self.mxfp4_backend,
            experts_cls=self.experts_cls,
            routing_tables=layer._expert_routing_tables(),
        )


class PlainMxfp4Experts(Mxfp4Experts):
    """The same on CPUs, where the experts stay as the checkpoint has them.

    vLLM's own kernel for CPUs needs AMX. This class is for tests of layouts, which have no GPU; it
    computes experts by ``plain_experts``, in any type of activations.
    """

    def __init__(self, moe: Any) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        self.weight_dtype = "gpt_oss_mxfp4"
        self.mxfp4_backend = Mxfp4MoeBackend.XPU  # which packs nothing
        self.experts_cls = PlainExperts
        self.w13_precision_config = self.w2_precision_config = None
        self._cache_permute_indices: dict[Any, Any] = {}

    @property
    def cuts(self) -> Cuts:
        """How experts can be divided among members."""
        return AS_STORED

    def get_fused_moe_quant_config(self, layer: nn.Module) -> Any:
        """Return the scales and biases, which are the layer's."""
        scales = layer.w13_weight_scale, layer.w2_weight_scale
        return mxfp4_w4a16_moe_quant_config(*scales, layer.w13_bias, layer.w2_bias)


def mxfp4_experts(moe: Any) -> Mxfp4Experts:
    """Return the method of a layer of GPT-OSS's experts on this device.

    Raises:
        NotImplementedError: vLLM would compute them by a kernel that is not served.
    """
    return PlainMxfp4Experts(moe) if current_platform.is_cpu() else Mxfp4Experts(moe)


# --- what is packed -------------------------------------------------------------------------------


def packed_experts(layer: nn.Module) -> dict[str, Packed]:
    """Return what vLLM has packed of a layer's experts, by the names of the layer's tensors."""
    found = {key: getattr(layer, key, None) for key in _TENSORS}
    for key, attribute in _CONFIGS.items():
        config = getattr(layer.quant_method, attribute)
        found[key] = found[key] if config is None else _unwrapped(config)
    return {key: value for key, value in found.items() if value is not None}


def range_of(packed: Packed, own: slice, experts: int) -> Packed:
    """Return the experts ``own`` of what was packed for all ``experts``, in place.

    Raises:
        NotImplementedError: experts do not follow each other in memory, or the range begins where
            kernels cannot read.
    """
    data = elements_of(packed)
    each = data.stride(0)
    if data.shape[0] != experts or each * experts != data.numel():
        raise NotImplementedError(
            f"experts are packed to {tuple(data.shape)} with strides {data.stride()}, which has no "
            f"ranges of experts, for vLLM's kernel; {_OTHERS}"
        )
    if each * data.itemsize * own.start % ALIGNMENT:
        raise NotImplementedError(
            f"an expert of {each * data.itemsize} bytes, as it is packed, is no multiple of "
            f"{ALIGNMENT}"
        )
    return _of_some(packed, own)


def in_rows(like: Packed, rows: torch.Tensor) -> Packed:
    """Return experts whose bytes lie one after the other as what ``like`` is.

    Args:
        like: some experts, in ranges (``range_of``).
        rows: ``[experts, elements of one]``, adjacent.
    """
    data = elements_of(like)
    sizes = (len(rows), *data.shape[1:])
    return _around(like, rows.as_strided(sizes, (rows.shape[1], *data.stride()[1:])))


def _of_some(packed: Packed, own: slice) -> Packed:
    return _around(packed, elements_of(packed)[own])


def _around(packed: Packed, view: torch.Tensor) -> Packed:
    """Return other experts, which are packed alike."""
    if isinstance(packed, torch.Tensor):
        return Parameter(view, requires_grad=False)
    shape, shape_max = ([len(view), *sizes[1:]] for sizes in (packed.shape, packed.shape_max))
    storage = replace(packed.storage, data=view)
    return replace(packed, storage=storage, shape=shape, shape_max=shape_max)


def _unwrapped(packed: Any) -> Packed:
    """Return the scales of a ``triton_kernels`` ``PrecisionConfig``, and all else as it is."""
    return weight_mx_scale(packed) if hasattr(packed, "flex_ctx") else packed


def elements_of(packed: Packed) -> torch.Tensor:
    """Return the tensor that has the elements of packed experts, ``[experts, ...]``."""
    tensor: torch.Tensor = packed if isinstance(packed, torch.Tensor) else packed.storage.data
    return tensor.data


def _show(layer: nn.Module, packed: Mapping[str, Packed]) -> None:
    """Register what is in no parameter, so that whoever counts a layer's bytes finds it."""
    for key, value in packed.items():
        if not isinstance(value, torch.Tensor):
            layer.register_buffer(f"{key}_packed", elements_of(value), persistent=False)


def _are_equal(one: Packed, other: Packed) -> bool:
    """Return whether both have the same bytes in the same places, for the same kernel."""
    return _are_alike(one, other) and elements_of(one).stride() == elements_of(other).stride()


def _are_alike(one: Packed, other: Packed) -> bool:
    """Return whether both have the same bytes in the same order, for the same kernel.

    In one of them there may be others between.
    """
    first, second = elements_of(one), elements_of(other)
    layouts = [type(getattr(getattr(of, "storage", None), "layout", None)) for of in (one, other)]
    shown = [tuple(of.shape) for of in (one, other)]
    return (
        layouts[0] is layouts[1]
        and shown[0] == shown[1]
        and (first.shape, first.dtype) == (second.shape, second.dtype)
        and _order(first) == _order(second)
        and torch.equal(_bytes(first), _bytes(second))
    )


def _order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions in the order in which they lie in memory, the outermost first."""
    longer = (of for of, size in enumerate(tensor.shape) if size > 1)
    return sorted(longer, key=lambda of: -tensor.stride(of))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, in which NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)
