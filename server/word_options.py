"""Options of the command line that take one of a few words."""

import argparse
import enum
from collections.abc import Callable
from typing import TypeVar

Word = TypeVar("Word", bound=enum.StrEnum)


def one_of(words: type[Word]) -> Callable[[str], Word]:
    """Return the ``type`` of such an option; argparse's own error would not name the right words.

    Args:
        words: all of them.
    """

    def read(text: str) -> Word:
        try:
            return words(text)
        except ValueError:
            known = ", ".join(words)
            raise argparse.ArgumentTypeError(f"{text!r}: choose one of {known}") from None

    return read
