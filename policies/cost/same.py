"""A key for results that are kept for one object, which may take long to compare with others."""

from typing import Generic, TypeVar

T = TypeVar("T")


class Same(Generic[T]):
    """Is equal to what stands for the same object, which must not change.

    Args:
        of: the object.
    """

    __slots__ = ("of",)

    def __init__(self, of: T) -> None:
        self.of = of

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.of is self.of
