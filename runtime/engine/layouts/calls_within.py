"""Lets every call of a method of one object happen within a context."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any


def call_within(
    owner: Any, method: str, manager: Callable[[Any], AbstractContextManager[None]]
) -> None:
    """Let every call of a method of this one object happen within a ``manager(owner)``.

    Several managers of one method are entered in the opposite order of these calls.
    """
    # vLLM freezes what is there after its warm-up, so a cycle would outlive the layout.
    reference = weakref.ref(owner)
    function = getattr(type(owner), method)
    former: Callable[..., Any] | None = vars(owner).get(method)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        this = reference()
        with manager(this):
            return function(this, *args, **kwargs) if former is None else former(*args, **kwargs)

    setattr(owner, method, call)
