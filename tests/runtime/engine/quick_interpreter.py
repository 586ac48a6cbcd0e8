"""Triton's interpreter, quicker: it works out once what it works out again for every operation.

For every launch and every call of a device function, it replaces the functions of
``triton.language`` by its own, and puts them back after the launch. Here it replaces them once: a
process that interprets compiles nothing. Types and shapes are looked up, not made anew.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def be_quick(*, find_overflows: bool) -> None:
    """Make the interpreter of this process quick, for good.

    Args:
        find_overflows: whether it computes every sum and product a second time, in 64 bits, to
            fail where the first one is too large for its type.
    """
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    signatures = {"getfullargspec": functools.cache(inspect.getfullargspec)}
    interpreter.inspect = SimpleNamespace(**vars(inspect) | signatures)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=find_overflows)
    tl.tensor.__init__ = _tensor
    tl.block_type.__init__ = _known(tl.block_type.__init__)


def _patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what replaces the language's functions on the first call, and never puts them back."""

    @functools.cache
    def patch_all() -> None:
        patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    def patched(function: Any) -> Any:
        patch_all()
        return SimpleNamespace(restore=lambda: None)

    return patched


def _by_name(np_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what looks NumPy's type up by the name of Triton's."""
    found: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        if dtype.name not in found:
            found[dtype.name] = np_type(dtype)
        return found[dtype.name]

    return look_up


def _known(make: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """Return what gives a type of blocks what ``make`` has given to one of the same elements."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def make_quickly(self: Any, of: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = of.name, getattr(of, "address_space", None), sizes
        if key not in known:
            make(self, of, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key])

    return make_quickly


@functools.cache
def _sizes(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return a shape and its number of elements as tensors have them."""
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def _tensor(self: Any, handle: Any, of: Any) -> None:
    """Do what ``tl.tensor.__init__`` does, with sizes that are made once for each shape."""
    self.handle, self.type, self.dtype = handle, of, of.scalar
    self.shape, self.numel = _sizes(tuple(of.shape) if of.is_block() else ())
